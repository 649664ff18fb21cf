"""The engine's own kernels: one C file, compiled for the processor that will run it."""
