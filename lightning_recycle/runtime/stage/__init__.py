"""A stage: forward and backward of its layers, its gradients, and its layers as they move."""
