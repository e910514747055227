"""Policies: ways to handle failures."""
