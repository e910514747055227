"""Launching process: prepares a run, starts and supervises its workers, and takes their results into the Trainer.

Also the beginning and the end of any worker process. Agents that start workers from outside, and
the environment that leads these to their run, are in :mod:`lightning_recycle.engines`.
"""
