"""Engines start worker processes, and describe the run in their environment.

``recycle-run`` and its agents, SLURM, Kubernetes and Ray; none imports torch. The launching process of ``Trainer.fit``
is in :mod:`lightning_recycle.launch`.
"""
