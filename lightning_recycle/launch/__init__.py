"""Launching process: prepares a run, supervises its workers, takes their results.

Also the beginning and the end of any worker process. Agents that start workers from outside are in
:mod:`lightning_recycle.engines`.
"""
