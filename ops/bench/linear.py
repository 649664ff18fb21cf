"""What one step's matrix products cost, by how the matrices are kept and by rows: `layers/linear`.

    python -m ops.bench.linear

Matrices of SmolLM2-135M's shapes, twelve layers of them (42 million weights: more than the caches
hold in fp32; four bits fit a large one), one thread, processor time, the best of a few rounds.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from nodeagent.engine.model.layers.linear import (
    Blocked,
    FourBit,
    Groups,
    Half,
    Keeping,
    Linear,
    Plain,
    native,
    tiled,
)

SHAPES: Final = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS: Final = 12
ROWS: Final = (1, 4, 8, 32, 128)
ROUNDS: Final = 4


class Int8:
    """Tried and not taken: eight bits, a scale a row, activations quantised as one tensor."""

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


def in_groups(weight: Tensor, bits: int) -> Groups:
    """Quantise in groups of 32."""
    grouped = weight.view(len(weight), -1, 32)
    offsets = grouped.amin(-1)
    scales = (grouped.amax(-1) - offsets) / (2**bits - 1)
    numbers = ((grouped - offsets[..., None]) / scales[..., None]).round().to(torch.uint8)
    return Groups(numbers.view(weight.shape), scales, offsets, bits)


def own(weight: Tensor, bits: int) -> Linear:
    """Keep for our own kernel, which is built where a compiler is."""
    found = native(in_groups(weight, bits), Keeping.NATIVE)
    if found is None:
        raise RuntimeError("cannot compare: our own kernels are not built here")
    return found


KINDS: Final[dict[str, Callable[[Tensor], Linear]]] = {
    "Plain fp32": Plain,
    "Blocked fp32": Blocked,
    "Half (fp16, FBGEMM)": Half,
    "Blocked bf16": lambda weight: Blocked(weight.bfloat16()),
    "FourBit (bf16 above 4 rows)": lambda weight: FourBit(in_groups(weight, 4)),
    "Native, four bits": lambda weight: own(weight, 4),
    "Native, eight bits": lambda weight: own(weight, 8),
    "Native, rounded floats": lambda weight: tiled([weight.half()], Keeping.NATIVE),
    "Native, fp16": lambda weight: tiled([weight.half()], Keeping.TILED),
    "Native, fp32": lambda weight: tiled([weight], Keeping.TILED),
    "int8 dynamic (not taken)": Int8,
}


def seconds(products: list[tuple[int, Linear]], rows: int) -> float:
    """Multiply by every matrix once; the best of the rounds."""
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
    """Print one row for each kind."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = [torch.randn(shape) * 0.02 for _ in range(LAYERS) for shape in SHAPES]
    print("| kept as | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |")
    print("|---" * (len(ROWS) + 1) + "|")
    for name, kind in KINDS.items():
        products = [(weight.shape[1], kind(weight)) for weight in weights]
        times = " | ".join(f"{seconds(products, rows) * 1e3:.1f}" for rows in ROWS)
        print(f"| {name} | {times} |", flush=True)


if __name__ == "__main__":
    main()
