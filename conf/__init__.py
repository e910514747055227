"""The Hydra configuration that ships with the package, as ``lightning_recycle.conf``.

In an application: ``@hydra.main(config_path="pkg://lightning_recycle.conf", ...)``, or name it as a search path,
``hydra.searchpath=[pkg://lightning_recycle.conf]``, to reuse the groups in a configuration of your own. The classes of
the groups ``model`` and ``data`` are those of ``examples/``.
"""
