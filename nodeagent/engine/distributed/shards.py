"""Which part of a model each rank holds, and which cut of each weight that is.

Rule 1: ranks are numbered stage by stage: a stage has some of the layers, and its ranks cut every
layer among themselves: queries, keys and values by heads, the MLP by its width, embeddings and head
by tokens. What is cut by rows answers in parts, what is cut by columns answers in sums.
Rule 2: where KV heads are fewer than the ranks of a stage, ranks that share one each hold it.
Rule 3: experts fall into `expert` groups of whole experts; the ranks of a group cut each expert.
"""

from dataclasses import dataclass, replace
from typing import Final

from nodeagent.engine.model.shape import CheckpointError, ModelShape

_BY_ROWS: Final = {
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
_BY_COLUMNS: Final = {"o_proj": "heads", "down_proj": "width", "w2": "width"}


@dataclass(frozen=True, slots=True)
class Split:
    """Into how many parts a model is split: stages of layers, and ranks within a stage."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """Groups of whole experts within a stage."""

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.tensor * self.pipeline

    @property
    def firsts(self) -> range:
        """The first rank of each stage."""
        return range(0, self.ranks, self.tensor)

    def on(self, place: int, nodes: int) -> range:
        """Return the ranks of one of several nodes, each of which has as many."""
        each = self.ranks // nodes
        return range(place * each, (place + 1) * each)

    def check(self, shape: ModelShape) -> None:
        """Raise CheckpointError where a model of `shape` cannot be split so."""
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
        uneven = not shape.experts or shape.experts % self.expert or tensor % self.expert
        if self.expert > 1 and uneven:
            raise CheckpointError(
                f"cannot split a model with expert_parallel {self.expert}: tensor_parallel {tensor}"
                f" and its {shape.experts or 'no'} experts must divide by it"
            )
        cutters = tensor // self.expert
        if shape.intermediate % cutters:
            raise CheckpointError(
                f"cannot split a model with tensor_parallel {tensor}: an MLP {shape.intermediate}"
                f" wide does not divide by {cutters}"
            )


ONE: Final = Split()


@dataclass(frozen=True, slots=True)
class Cut:
    """Numbers [start, end) of a weight along one of its axes, and the weight's whole shape."""

    whole: tuple[int, ...]
    axis: int
    start: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is cut out."""
        length = self.end - self.start
        return (*self.whole[: self.axis], length, *self.whole[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of a model of the shape `whole`."""

    whole: ModelShape
    split: Split = ONE
    rank: int = 0

    @property
    def stage(self) -> int:
        """Which of the pipeline's stages the rank is in."""
        return self.rank // self.split.tensor

    @property
    def first(self) -> bool:
        """True where its stage is the first."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """True where its stage is the last."""
        return self.stage == self.split.pipeline - 1

    @property
    def layers(self) -> range:
        """The layers of its stage."""
        return _part(self.whole.layers, self.stage, self.split.pipeline)

    @property
    def heads(self) -> range:
        """Its heads."""
        return _part(self.whole.heads, self._place, self.split.tensor)

    @property
    def kv_heads(self) -> range:
        """The KV heads that its heads look at."""
        per_kv_head = self.whole.heads // self.whole.kv_heads
        heads = self.heads
        return range(heads.start // per_kv_head, (heads.stop - 1) // per_kv_head + 1)

    @property
    def experts(self) -> range:
        """Its experts."""
        cutters = self.split.tensor // self.split.expert
        return _part(self.whole.experts, self._place // cutters, self.split.expert)

    @property
    def tokens(self) -> range:
        """The tokens whose embeddings and logits are its own."""
        return self.tokens_of(self.rank)

    def tokens_of(self, rank: int) -> range:
        """Return the same of another rank."""
        return _part(self.whole.vocabulary, rank % self.split.tensor, self.split.tensor)

    @property
    def shape(self) -> ModelShape:
        """The numbers of the share itself; its `experts` are those of the whole, for the router."""
        return replace(
            self.whole,
            layers=len(self.layers),
            heads=len(self.heads),
            kv_heads=len(self.kv_heads),
            intermediate=len(self._width),
            vocabulary=len(self.tokens),
        )

    def parameters(self) -> int:
        """How many weights it has."""
        if self.split.ranks == 1:
            return self.whole.parameters()
        shape = self.shape
        elsewhere = shape.experts - len(self.experts)
        return shape.parameters() - elsewhere * shape.layers * 3 * shape.hidden * shape.intermediate

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """Return which part of the weight `name` its own `shape` is; None where it is all of it."""
        module = name.split(".")[-2]
        kind, axis = (_BY_ROWS.get(module), 0)
        if kind is None:
            kind, axis = _BY_COLUMNS.get(module), len(shape) - 1
        if kind is None or self.split.tensor == 1:
            return None
        part, unit, total = {
            "heads": (self.heads, self.whole.head_dim, self.whole.heads),
            "kv_heads": (self.kv_heads, self.whole.head_dim, self.whole.kv_heads),
            "width": (self._width, 1, self.whole.intermediate),
            "tokens": (self.tokens, 1, self.whole.vocabulary),
        }[kind]
        whole = tuple(total * unit if at == axis else size for at, size in enumerate(shape))
        return Cut(whole, axis, part.start * unit, part.stop * unit)

    @property
    def _place(self) -> int:
        """Which rank of its stage it is."""
        return self.rank % self.split.tensor

    @property
    def _width(self) -> range:
        cutters = self.split.tensor // self.split.expert
        return _part(self.whole.intermediate, self._place % cutters, cutters)


def _part(total: int, number: int, parts: int) -> range:
    """Return the `number`th of so many parts, which differ by one at most."""
    return range(total * number // parts, total * (number + 1) // parts)
