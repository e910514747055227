"""One worker under Lightning: loops, hooks, loggers, checkpoints, state transfer."""
