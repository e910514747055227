"""What the user writes: the module, its layers, weights that layers share, and how layers are cut into stages."""
