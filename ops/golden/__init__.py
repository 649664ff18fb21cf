"""Golden values: what other implementations compute, made once and committed for the tests."""
