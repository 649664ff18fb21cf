"""The engine's own kernels: C, compiled for the processor that will run it."""
