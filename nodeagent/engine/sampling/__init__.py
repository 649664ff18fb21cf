"""Samples the next token of each sequence from the model's logits."""
