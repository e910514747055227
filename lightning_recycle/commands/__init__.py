"""Console scripts: Hydra applications around ``planning``, without torch."""
