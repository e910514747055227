"""Engines: what starts worker processes, and the environment by which a worker finds its run.

``recycle-run`` and its agents, SLURM, Kubernetes and Ray. None of it knows what a worker does, nor imports torch. The
launching process, which starts the workers of ``Trainer.fit`` itself or through Ray, is in
:mod:`lightning_recycle.launch`.
"""
