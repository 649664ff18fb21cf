"""The steps of one request on its way to the engine and back."""
