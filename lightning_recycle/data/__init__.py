"""Batches by address, so that any worker fetches any micro-batch; and streams that return to a place."""
