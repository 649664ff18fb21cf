"""Decides which part of a model each rank holds, and which slice of each weight that is.

Rule 1: ranks are numbered stage by stage. A pipeline stage has some of the layers, and its ranks
divide every layer: queries, keys and values by heads, the MLP by its width, embeddings and output
head by tokens. A matrix sliced along its rows produces a part of the output; one sliced along its
columns produces a summand of it.
Rule 2: with fewer KV heads than ranks in a stage, the ranks that share a KV head each hold it.
Rule 3: experts are divided into `expert` groups of whole experts; the ranks of a group divide each
expert.
"""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.architecture.errors import CheckpointError

_SLICED_ROWS: Final = {
    "q_proj": "heads",
    "k_proj": "kv_heads",
    "v_proj": "kv_heads",
    "gate_proj": "width",
    "up_proj": "width",
    "w1": "width",
    "w3": "width",
    "embed_tokens": "tokens",
    "lm_head": "tokens",
}
_SLICED_COLUMNS: Final = {"o_proj": "heads", "down_proj": "width", "w2": "width"}


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Into how many parts a model is split: pipeline stages, and ranks within a stage."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """Groups of whole experts within a stage."""

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.tensor * self.pipeline

    @property
    def first_ranks(self) -> range:
        """The first rank of each stage."""
        return range(0, self.ranks, self.tensor)

    def ranks_on_node(self, node: int, nodes: int) -> range:
        """Return the ranks of node number `node` of `nodes`, which have equally many."""
        per_node = self.ranks // nodes
        return range(node * per_node, (node + 1) * per_node)

    def check(self, shape: DecoderShape) -> None:
        """Raise CheckpointError if a model of `shape` cannot be split this way."""
        tensor = self.tensor
        reason = ""
        if shape.heads % tensor:
            reason = f"{shape.heads} heads do not divide by it"
        elif shape.kv_heads % tensor and tensor % shape.kv_heads:
            reason = f"{shape.kv_heads} KV heads neither divide by it nor into it"
        elif shape.vocabulary < tensor:
            reason = f"the vocabulary has {shape.vocabulary} tokens"
        if reason:
            raise CheckpointError(f"cannot split a model with tensor_parallel {tensor}: {reason}")
        if self.pipeline > shape.layers:
            raise CheckpointError(
                f"cannot split a model with pipeline_parallel {self.pipeline}: it has"
                f" {shape.layers} layers"
            )
        is_uneven = not shape.experts or shape.experts % self.expert or tensor % self.expert
        if self.expert > 1 and is_uneven:
            raise CheckpointError(
                f"cannot split a model with expert_parallel {self.expert}: tensor_parallel {tensor}"
                f" and its {shape.experts or 'no'} experts must divide by it"
            )
        ranks_per_expert = tensor // self.expert
        if shape.intermediate % ranks_per_expert:
            raise CheckpointError(
                f"cannot split a model with tensor_parallel {tensor}: an MLP {shape.intermediate}"
                f" wide does not divide by {ranks_per_expert}"
            )


NOT_SPLIT: Final = ParallelConfig()


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Indices [start, end) of a weight along one axis, and the shape of the whole weight."""

    whole: tuple[int, ...]
    axis: int
    start: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slice."""
        length = self.end - self.start
        return (*self.whole[: self.axis], length, *self.whole[self.axis + 1 :])


class _SlicedAxis(NamedTuple):
    """The division of an axis of a weight: the rank's `part` of `total` units of `unit` indices."""

    part: range
    total: int
    unit: int = 1


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The part of a model of shape `whole` that one rank holds."""

    whole: DecoderShape
    split: ParallelConfig = NOT_SPLIT
    rank: int = 0

    @property
    def stage(self) -> int:
        """The number of the rank's pipeline stage."""
        return self.rank // self.split.tensor

    @property
    def is_first_stage(self) -> bool:
        """True if the rank's stage is the first."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True if the rank's stage is the last."""
        return self.stage == self.split.pipeline - 1

    @property
    def layers(self) -> range:
        """The layers of the rank's stage."""
        return _part(self.whole.layers, self.stage, self.split.pipeline)

    @property
    def heads(self) -> range:
        """The rank's attention heads."""
        return _part(self.whole.heads, self._rank_in_stage, self.split.tensor)

    @property
    def kv_heads(self) -> range:
        """The KV heads that the rank's attention heads use."""
        per_kv_head = self.whole.heads // self.whole.kv_heads
        heads = self.heads
        return range(heads.start // per_kv_head, (heads.stop - 1) // per_kv_head + 1)

    @property
    def experts(self) -> range:
        """The rank's experts."""
        ranks_per_expert = self.split.tensor // self.split.expert
        return _part(self.whole.experts, self._rank_in_stage // ranks_per_expert, self.split.expert)

    @property
    def tokens(self) -> range:
        """The token ids whose embeddings and logits the rank holds."""
        return self.tokens_of(self.rank)

    def tokens_of(self, rank: int) -> range:
        """Return the token ids whose embeddings and logits `rank` holds."""
        return _part(self.whole.vocabulary, rank % self.split.tensor, self.split.tensor)

    @property
    def shape(self) -> DecoderShape:
        """The shape of the shard; its `experts` are those of the whole, for the router."""
        return replace(
            self.whole,
            layers=len(self.layers),
            heads=len(self.heads),
            kv_heads=len(self.kv_heads),
            intermediate=len(self._mlp_width),
            vocabulary=len(self.tokens),
        )

    def parameters(self) -> int:
        """Return the number of weights of the shard."""
        if self.split.ranks == 1:
            return self.whole.parameters()
        shape = self.shape
        elsewhere = shape.experts - len(self.experts)
        return shape.parameters() - elsewhere * shape.layers * 3 * shape.hidden * shape.intermediate

    def slice_of(self, name: str, shape: tuple[int, ...]) -> WeightSlice | None:
        """Return the slice that the rank holds of the weight `name`, or None if it holds it whole.

        `shape` is the shape of the slice.
        """
        module = name.split(".")[-2]
        kind, axis = (_SLICED_ROWS.get(module), 0)
        if kind is None:
            kind, axis = _SLICED_COLUMNS.get(module), len(shape) - 1
        if kind is None or self.split.tensor == 1:
            return None
        whole = self.whole
        part, total, unit = {
            "heads": _SlicedAxis(self.heads, whole.heads, whole.head_dim),
            "kv_heads": _SlicedAxis(self.kv_heads, whole.kv_heads, whole.head_dim),
            "width": _SlicedAxis(self._mlp_width, whole.intermediate),
            "tokens": _SlicedAxis(self.tokens, whole.vocabulary),
        }[kind]
        whole_shape = tuple(total * unit if at == axis else size for at, size in enumerate(shape))
        return WeightSlice(whole_shape, axis, part.start * unit, part.stop * unit)

    @property
    def _rank_in_stage(self) -> int:
        return self.rank % self.split.tensor

    @property
    def _mlp_width(self) -> range:
        """The columns of the MLP that the rank holds, of each of its experts."""
        ranks_per_expert = self.split.tensor // self.split.expert
        number = self._rank_in_stage % ranks_per_expert
        return _part(self.whole.intermediate, number, ranks_per_expert)


def _part(total: int, number: int, parts: int) -> range:
    """Return part `number` of range(total) divided into `parts` parts of nearly equal length."""
    return range(total * number // parts, total * (number + 1) // parts)
