"""Checks for wrong bits: checksums, recomputation by peers, and values that are not finite."""
