"""Speculation: tokens drafted cheaply, verified by the model several at once."""
