"""A model's files as one rank sees them: of each weight, its own part is read and no more."""

from torch import Tensor

from nodeagent.engine.checkpoint.stored import Stored
from nodeagent.engine.layers.linear import Filed, Groups
from nodeagent.engine.models.weights import WeightSource
from nodeagent.engine.parallel.share import Cut, Share


class SharedSource:
    """Reads what `share` says of `source`, under the shapes of the share itself."""

    def __init__(self, source: WeightSource, share: Share) -> None:
        self._source = source
        self._share = share

    def tensor(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Tensor:
        """Read this rank's part of one weight."""
        cut = self._share.cut(name, shape)
        return self._source.tensor(name, cut.whole if cut else shape, cut)

    def stored(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Stored | None:
        """Return where this rank's part of one weight lies."""
        cut = self._share.cut(name, shape)
        return self._source.stored(name, cut.whole if cut else shape, cut)

    def groups(
        self, name: str, shape: tuple[int, ...], cut: Cut | None = None
    ) -> Groups | Filed | None:
        """Read this rank's part of one matrix as its file quantises it."""
        cut = self._share.cut(name, shape)
        return self._source.groups(name, cut.whole if cut else shape, cut)

    def check(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> None:
        """Raise CheckpointError where `tensor` would."""
        cut = self._share.cut(name, shape)
        self._source.check(name, cut.whole if cut else shape, cut)

    def has(self, name: str) -> bool:
        """Ask the source."""
        return self._source.has(name)
