"""Kernels for NVIDIA GPUs: Triton kernels and captured graphs.

These modules are used only on such a device. Where Triton is missing, torch's kernels run the same
steps; the log says which were chosen.
"""
