"""Console scripts: thin Hydra applications around ``planning`` and ``visualize``. They start without torch."""
