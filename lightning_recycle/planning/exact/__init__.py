"""Exact planners: mixed-integer and constraint models in a separate process."""
