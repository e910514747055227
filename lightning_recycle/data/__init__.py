"""Batches by address: any worker fetches any micro-batch, and streams in which a place is found again."""
