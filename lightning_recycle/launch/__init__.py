"""The launching process: it starts the workers, waits, and takes their results."""
