"""Engines start worker processes, and describe the run in their environment.

``recycle-run`` and its agents, SLURM and Kubernetes; none imports torch. The launching process of ``Trainer.fit``, and
Ray's actors, are in :mod:`lightning_recycle.launch`.
"""
