"""The forward passes of the supported model families, built from their weight files."""
