"""Fuzzers: mutated requests and model files, made from valid ones."""
