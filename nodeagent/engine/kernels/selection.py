"""Chooses the kernels of a model, once, when it is loaded."""

import torch

from isochrone.wire.engines.engine import Quantisation
from nodeagent.engine.kernels.attention_backend import AttentionBackend, AttentionConfig
from nodeagent.engine.kernels.cpu.attention import CpuAttention
from nodeagent.engine.kernels.cpu.library import cpu_kernels
from nodeagent.engine.kernels.cpu.linear import (
    NativeBytesBackend,
    NativeFloatBackend,
    NativeQuantisedBackend,
)
from nodeagent.engine.kernels.cuda.attention import TritonAttention
from nodeagent.engine.kernels.cuda.triton_kernels import paged_kernels, triton_kernels
from nodeagent.engine.kernels.linear_backend import LinearBackend
from nodeagent.engine.kernels.row_ops import RowOps
from nodeagent.engine.kernels.torch.attention import TorchAttention
from nodeagent.engine.kernels.torch.linear import OneDnnBackend, PackedBackend, PlainBackend
from nodeagent.engine.kernels.torch.row_ops import TorchRowOps


def choose_attention(config: AttentionConfig) -> AttentionBackend:
    """Return the fastest attention for `config`: Triton's, the C kernels', or torch's."""
    triton = paged_kernels(torch.device(config.device), config.kv_format.dtype)
    if triton is not None:
        return TritonAttention(config, triton)
    kernels = cpu_kernels() if CpuAttention.fits(config) else None
    return TorchAttention(config) if kernels is None else CpuAttention(config, kernels)


def choose_row_ops(device: str, dtype: torch.dtype) -> RowOps:
    """Return the fastest row operations for activations of `dtype` on `device`."""
    triton = triton_kernels(torch.device(device))
    if triton is not None:
        return triton
    kernels = cpu_kernels() if device == "cpu" and dtype is torch.float32 else None
    return TorchRowOps() if kernels is None else kernels


def choose_linear(
    device: str, dtype: torch.dtype, quantisation: Quantisation
) -> tuple[LinearBackend, str]:
    """Return a linear backend for one model, and the reason for the choice, for the log."""
    if device != "cpu":
        return PlainBackend(), "devices other than the CPU multiply by matrices as they are"
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    # Without AVX-512 oneDNN has no bf16.
    has_bf16: bool = has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not has_onednn or dtype not in (torch.float32, *([torch.bfloat16] if has_bf16 else [])):
        return PlainBackend(), f"this processor has no kernel for another layout of {dtype}"
    kernels = cpu_kernels() if dtype is torch.float32 else None
    if kernels is not None:
        if quantisation == "int8":
            return NativeBytesBackend(kernels), "the C kernels multiply rows rounded to bytes"
        if quantisation != "none":
            return NativeQuantisedBackend(kernels), "the C kernels multiply by the file's groups"
        return NativeFloatBackend(kernels), "the C kernels multiply by the file's floats"
    has_fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
    if quantisation in ("file", "int8") and has_fbgemm and has_bf16 and dtype is torch.float32:
        return PackedBackend(), "torch has kernels for packed matrices on this processor"
    return OneDnnBackend(), f"oneDNN's layout is the fastest for {dtype} on this processor"
