"""Plans of a run: made ahead, in need, or for other times of operations."""
