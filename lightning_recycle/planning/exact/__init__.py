"""Exact planners: mixed-integer and constraint models, solved in a process of their own."""
