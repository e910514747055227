"""The user's model: its module, its layers, shared weights, the cut into stages."""
