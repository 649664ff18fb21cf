"""The small modules a model is made of."""
