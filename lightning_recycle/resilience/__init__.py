"""The control plane: who is alive, what is agreed, what to redo. Standard library and ``planning`` only, no torch."""
