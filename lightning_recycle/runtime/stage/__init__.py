"""A stage: its layers, their gradients, and their exchange with other stages."""
