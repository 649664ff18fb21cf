"""The cost of one step's matrix products, by the format of the matrices and by rows.

    python -m ops.bench.linear [--only "four bits" bf16]

Matrices of SmolLM2-135M's shapes, twelve layers of them (42 million weights: more than the caches
hold in fp32; in four bits they fit a large cache), one thread, processor time, best of a few
rounds.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from nodeagent.engine.kernels.cpu.library import CpuKernels, cpu_kernels
from nodeagent.engine.kernels.linear_backend import Linear
from nodeagent.engine.kernels.matrix_formats import QuantisedGroups
from nodeagent.engine.kernels.torch.linear import Fp16Linear, Int4Linear, OneDnnLinear, PlainLinear

SHAPES: Final = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS: Final = 12
ROWS: Final = (1, 4, 8, 32, 128)
ROUNDS: Final = 4


class Int8:
    """Evaluated and rejected: 8 bits, one scale per row, activations quantised as one tensor."""

    def __init__(self, weight: Tensor) -> None:
        scales = weight.abs().amax(-1) / 127
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch._make_per_channel_quantized_tensor(
                (weight / scales[:, None]).round().to(torch.int8),
                scales.double(),
                torch.zeros(len(scales), dtype=torch.int64),
                0,
            )
        self._packed: Any = torch.ops.quantized.linear_prepack(quantised, None)
        self._multiply: Any = torch.ops.quantized.linear_dynamic.default

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        answer: Tensor = self._multiply(x, self._packed)
        return answer


def in_groups(weight: Tensor, bits: int) -> QuantisedGroups:
    """Quantise in groups of 32."""
    grouped = weight.view(len(weight), -1, 32)
    offsets = grouped.amin(-1)
    scales = (grouped.amax(-1) - offsets) / (2**bits - 1)
    numbers = ((grouped - offsets[..., None]) / scales[..., None]).round().to(torch.uint8)
    return QuantisedGroups(numbers.view(weight.shape), scales, offsets, bits)


def native() -> CpuKernels:
    """Return the C kernels, or raise RuntimeError if they are not built here."""
    kernels = cpu_kernels()
    if kernels is None:
        raise RuntimeError("cannot compare: the C kernels are not built on this machine")
    return kernels


KINDS: Final[dict[str, Callable[[Tensor], Linear]]] = {
    "PlainLinear fp32": PlainLinear,
    "OneDnnLinear fp32": OneDnnLinear,
    "Fp16Linear (fp16, FBGEMM)": Fp16Linear,
    "OneDnnLinear bf16": lambda weight: OneDnnLinear(weight.bfloat16()),
    "Int4Linear (bf16 above 4 rows)": lambda weight: Int4Linear(in_groups(weight, 4)),
    "Native, four bits": lambda weight: native().pack_groups(in_groups(weight, 4)),
    "Native, eight bits": lambda weight: native().pack_groups(in_groups(weight, 8)),
    "Native, four bits by bytes": lambda weight: native().pack_groups(in_groups(weight, 4), True),
    "Native, eight bits by bytes": lambda weight: native().pack_groups(in_groups(weight, 8), True),
    "Native, rounded floats": lambda weight: native().pack_floats([weight.half()], rounded=True),
    "Native, fp16": lambda weight: native().pack_floats([weight.half()], rounded=False),
    "Native, fp32": lambda weight: native().pack_floats([weight], rounded=False),
    "int8 dynamic (rejected)": Int8,
}


def seconds(products: list[tuple[int, Linear]], rows: int) -> float:
    """Return the seconds to multiply by every matrix once, best of the rounds."""
    inputs = {columns: torch.randn(rows, columns) for columns, _ in products}
    best_s = float("inf")
    for _ in range(ROUNDS):
        started_s = time.thread_time()
        for columns, product in products:
            product(inputs[columns])
        best_s = min(best_s, time.thread_time() - started_s)
    return best_s


@torch.inference_mode()
def main() -> None:
    """Print one row for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of formats")
    wanted = parser.parse_args().only
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = [torch.randn(shape) * 0.02 for _ in range(LAYERS) for shape in SHAPES]
    print("| kept as | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |")
    print("|---" * (len(ROWS) + 1) + "|")
    for name, kind in KINDS.items():
        if not any(part in name for part in wanted):
            continue
        products = [(weight.shape[1], kind(weight)) for weight in weights]
        times = " | ".join(f"{seconds(products, rows) * 1e3:.1f}" for rows in ROWS)
        print(f"| {name} | {times} |", flush=True)


if __name__ == "__main__":
    main()
