"""The shape of a BERT encoder, and the output computed from its last layer."""

from dataclasses import dataclass
from typing import Literal

from nodeagent.engine.architecture.errors import CheckpointError

Pooling = Literal["mean", "cls"]

_DIMENSION_MAX = 2**40


@dataclass(frozen=True, slots=True)
class BertShape:
    """The numbers that determine the shape of every weight, and the kind of output.

    A model with `labels` is a classifier: it scores the pooled first token with a linear head.
    A model without embeds: it pools the last layer.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    positions: int
    kinds: int
    """Number of token types (segment ids), usually 2: first text, second text."""
    epsilon: float
    labels: int = 0
    pooling: Pooling = "mean"
    normalised: bool = True
    """Whether embeddings are scaled to length one."""

    def __post_init__(self) -> None:
        numbers = [self.layers, self.hidden, self.intermediate, self.heads]
        numbers += [self.vocabulary, self.positions, self.kinds]
        is_sound = 0 <= self.epsilon < 1 and self.labels >= 0
        if (
            min(numbers) < 1
            or max(numbers) > _DIMENSION_MAX
            or not is_sound
            or self.hidden % self.heads
        ):
            raise CheckpointError(f"cannot use a model of this shape: {self}")

    @property
    def width(self) -> int:
        """Numbers in the output for one text."""
        return self.labels or self.hidden

    def parameters(self) -> int:
        """Return the number of weights."""
        layer = 4 * self.hidden * (self.hidden + 1) + 4 * self.hidden
        layer += 2 * self.hidden * self.intermediate + self.intermediate + self.hidden
        embeddings = (self.vocabulary + self.positions + self.kinds + 2) * self.hidden
        head = (self.hidden + 1) * (self.hidden + self.labels) if self.labels else 0
        return self.layers * layer + embeddings + head
