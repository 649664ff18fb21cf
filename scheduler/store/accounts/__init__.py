"""The rows of keys, budgets and usage."""
