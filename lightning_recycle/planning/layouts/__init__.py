"""Layouts: layers and workers of each stage, chosen anew after failures."""
