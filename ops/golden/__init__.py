"""Golden values for the tests: outputs of other implementations, generated once and committed."""
