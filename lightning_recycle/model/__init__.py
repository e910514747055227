"""The user's side of a model: the module, its layers, weights that layers share, and how layers are cut into stages."""
