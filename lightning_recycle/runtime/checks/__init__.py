"""Checks for wrong bits and for values that are not finite."""
