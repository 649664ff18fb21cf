"""Computes what a model's layers need, with the fastest kernels of the device.

`linear_backend`, `attention_backend` and `row_ops` say what layers may call. The packages `torch`,
`cpu` (our C library) and `cuda` (Triton) implement them; `selection` chooses once, when a model is
loaded.
"""
