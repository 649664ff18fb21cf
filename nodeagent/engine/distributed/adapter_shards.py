"""Adapters where a model is split: the front reads them whole, and gives each rank its part.

Rule 1: a module's product is cut as its matrix is. Where that is by rows, `up` is cut alike and
`down` is everybody's; where it is by columns, `down` is cut, and the sum over ranks has it all.
Rule 2: a rank is given an adapter before the first step that runs with it, by what it says, so that
nodes without its files have it too; and forgets it once the front has nobody who holds it.
"""

from collections.abc import Iterable
from weakref import ref

import torch
from torch import Tensor

from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.core.model_step import Piece
from nodeagent.engine.distributed.commands import Adapt, Forget
from nodeagent.engine.distributed.shards import Share
from nodeagent.engine.distributed.worker_group import Crew
from nodeagent.engine.model.layers.lora import Adapter, Adding


class Given:
    """What all ranks were given, the front's own among them."""

    def __init__(self, crew: Crew, runner: Runner, share: Share) -> None:
        self._crew = crew
        self._runner = runner
        self._share = share
        self._held: dict[bytes, ref[Adapter]] = {}

    def give(self, pieces: Iterable[Piece]) -> None:
        """Give what a step runs with and was not given yet; have forgotten what nobody holds."""
        for digest in [digest for digest, held in self._held.items() if held() is None]:
            del self._held[digest]
            self._crew.tell(Forget(digest))
            self._runner.adapters.pop(digest)
        for piece in pieces:
            adapter = piece.adapter
            if not isinstance(adapter, Adapter):
                continue
            if adapter.digest not in self._held:
                order = told(adapter)
                self._crew.tell(order)
                take(order, self._runner, self._share)
            # The same, read again, may outlive the one that was given.
            self._held[adapter.digest] = ref(adapter)


def told(adapter: Adapter) -> Adapt:
    """Return the adapter as it is told."""
    parts = {
        module: (raw(down), raw(up), down.shape[0]) for module, (down, up) in adapter.pairs.items()
    }
    dtype = next(iter(adapter.pairs.values()))[0].dtype
    return Adapt(adapter.name, adapter.digest, str(dtype).removeprefix("torch."), parts)


def take(order: Adapt, runner: Runner, share: Share) -> None:
    """Keep this rank's part of an adapter."""
    dtype = getattr(torch, order.dtype)
    pairs = {}
    for module, (down, up, rank) in order.parts.items():
        if module in runner.adding.modules:
            whole = _read(down, dtype, rank), _read(up, dtype, rank, columns=True)
            mine = _cut(module, whole, runner.adding, share)
            down_here, up_here = (one.contiguous().to(runner.device) for one in mine)
            pairs[module] = down_here, up_here
    size_bytes = sum(one.nbytes for pair in pairs.values() for one in pair)
    runner.adapters[order.digest] = Adapter(order.name, pairs, order.digest, size_bytes)


def raw(contents: Tensor) -> bytes:
    """Return the bytes of `contents`, which lie on the host."""
    flat: bytes = contents.contiguous().view(torch.uint8).numpy().tobytes()
    return flat


def _read(contents: bytes, dtype: torch.dtype, rank: int, *, columns: bool = False) -> Tensor:
    flat = torch.frombuffer(bytearray(contents), dtype=dtype)
    return flat.view(-1, rank) if columns else flat.view(rank, -1)


def _cut(
    module: str, whole: tuple[Tensor, Tensor], adding: Adding, share: Share
) -> tuple[Tensor, Tensor]:
    down, up = whole
    cut = share.cut(f"{module}.weight", adding.modules[module])
    if cut is None:
        return whole
    return (down, up[cut.start : cut.end]) if cut.axis == 0 else (down[:, cut.start : cut.end], up)
