"""What the engine does in its own way on NVIDIA GPUs: kernels in Triton, graphs, weights streamed.

Nothing here is imported where there is no such device. Where Triton is missing the same steps run
by torch's own kernels, and which was taken is logged.
"""
