"""Layouts: layers and workers of each stage, and the best layout for the workers that are left."""
