"""One worker under Lightning: what connects its loops, hooks, loggers and checkpoints to the executor."""
