"""One file for each model family: its shape, its weights, its forward pass."""
