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

from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.distributed.shards import ModelShard
from nodeagent.engine.model.lora import ActiveAdapters
from nodeagent.engine.scheduler.forward_batch import ForwardChunk
from nodeagent.engine.weights.lora_adapter import LoraAdapter
from nodeagent.engine.workers.commands import AddAdapter, RemoveAdapter
from nodeagent.engine.workers.worker_group import WorkerGroup


class AdapterDistributor:
    """What all ranks were given, the front's own among them."""

    def __init__(self, crew: WorkerGroup, runner: ModelRunner, share: ModelShard) -> None:
        self._crew = crew
        self._runner = runner
        self._share = share
        self._held: dict[bytes, ref[LoraAdapter]] = {}

    def give(self, pieces: Iterable[ForwardChunk]) -> None:
        """Give what a step runs with and was not given yet; have forgotten what nobody holds."""
        for digest in [digest for digest, held in self._held.items() if held() is None]:
            del self._held[digest]
            self._crew.tell(RemoveAdapter(digest))
            self._runner.adapters.pop(digest)
        for piece in pieces:
            adapter = piece.adapter
            if not isinstance(adapter, LoraAdapter):
                continue
            if adapter.digest not in self._held:
                order = add_adapter_command(adapter)
                self._crew.tell(order)
                keep_adapter_shard(order, self._runner, self._share)
            # The same, read again, may outlive the one that was given.
            self._held[adapter.digest] = ref(adapter)


def add_adapter_command(adapter: LoraAdapter) -> AddAdapter:
    """Return the adapter as it is told."""
    parts = {
        module: (tensor_bytes(down), tensor_bytes(up), down.shape[0])
        for module, (down, up) in adapter.pairs.items()
    }
    dtype = next(iter(adapter.pairs.values()))[0].dtype
    return AddAdapter(adapter.name, adapter.digest, str(dtype).removeprefix("torch."), parts)


def keep_adapter_shard(order: AddAdapter, runner: ModelRunner, share: ModelShard) -> None:
    """Keep this rank's part of an adapter."""
    dtype = getattr(torch, order.dtype)
    pairs = {}
    for module, (down, up, rank) in order.parts.items():
        if module in runner.active_adapters.modules:
            whole = _read(down, dtype, rank), _read(up, dtype, rank, columns=True)
            mine = _cut(module, whole, runner.active_adapters, share)
            down_here, up_here = (one.contiguous().to(runner.device) for one in mine)
            pairs[module] = down_here, up_here
    size_bytes = sum(one.nbytes for pair in pairs.values() for one in pair)
    runner.adapters[order.digest] = LoraAdapter(order.name, pairs, order.digest, size_bytes)


def tensor_bytes(contents: Tensor) -> bytes:
    """Return the bytes of `contents`, which lie on the host."""
    flat: bytes = contents.contiguous().view(torch.uint8).numpy().tobytes()
    return flat


def _read(contents: bytes, dtype: torch.dtype, rank: int, *, columns: bool = False) -> Tensor:
    flat = torch.frombuffer(bytearray(contents), dtype=dtype)
    return flat.view(-1, rank) if columns else flat.view(rank, -1)


def _cut(
    module: str, whole: tuple[Tensor, Tensor], adding: ActiveAdapters, share: ModelShard
) -> tuple[Tensor, Tensor]:
    down, up = whole
    cut = share.cut(f"{module}.weight", adding.modules[module])
    if cut is None:
        return whole
    return (down, up[cut.start : cut.end]) if cut.axis == 0 else (down[:, cut.start : cut.end], up)
