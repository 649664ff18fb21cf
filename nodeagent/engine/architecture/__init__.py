"""What a model is, in numbers, whichever file they come from."""
