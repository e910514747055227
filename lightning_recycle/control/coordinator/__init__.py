"""The coordinator's process: thread, clocks, admission, the runs it serves."""
