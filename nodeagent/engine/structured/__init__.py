"""Holding an output to a grammar: compiled off the step thread, obeyed at each token."""
