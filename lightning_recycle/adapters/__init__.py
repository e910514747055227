"""Pipelines made of models that were not written for one; each module needs what it adapts, and nothing else does."""
