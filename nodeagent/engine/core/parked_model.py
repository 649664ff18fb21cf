"""A model that sleeps in a file: its weights are copied there once, its KV is dropped.

The model stays as it is, with all addresses, so a wake reads the copy and builds nothing.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from shutil import disk_usage
from typing import Final

from torch import Tensor

from nodeagent.engine.architecture.errors import MemoryShortage
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.memory.memory_watch import available_bytes
from nodeagent.engine.memory.parked_memory import ParkedMemory, drop_pages, use_small_pages

log = logging.getLogger(__name__)

FREE_COPIES_MIN: Final = 4
"""A copy is written only if the disk has space for this many: it is not worth a full disk."""


class ParkedModel:
    """Parks the model of one engine, again and again."""

    def __init__(self, weight_regions: Callable[[], list[Tensor]], folder: Path) -> None:
        """`weight_regions` returns the memory of all weights; empty where it cannot be parked."""
        self._weight_regions = weight_regions
        self._folder = folder
        self._copy: ParkedMemory | None = None
        self._runner: ModelRunner | None = None

    def prepare(self) -> bool:
        """Copy the weights, unless that was done; return False where no copy can be made."""
        regions = self._weight_regions()
        if self._copy is not None or not regions:
            return self._copy is not None
        size_bytes = sum(map(len, regions))
        try:
            if disk_usage(self._folder).free < FREE_COPIES_MIN * size_bytes:
                return False
            self._copy = ParkedMemory(self._folder, regions)
        except OSError:
            return False
        return True

    def park(self, runner: ModelRunner) -> bool:
        """Drop the memory of `runner`; return False, and leave it, where no copy can be made."""
        if not self.prepare() or self._copy is None:
            return False
        try:
            self._copy.drop()
            for pages in runner.kv_pages():
                drop_pages(pages)
                use_small_pages(pages)
        except OSError:
            return False
        self._runner = runner
        return True

    def restore(self) -> ModelRunner | None:
        """Return the parked model, able to run again; None if it must be loaded from its files.

        It must be loaded if no model is parked. A parked copy that cannot be read is dropped.
        Raises MemoryShortage if there is not enough memory for the model.
        """
        runner, copy = self._runner, self._copy
        if runner is None or copy is None:
            return None
        needed = copy.size_bytes + sum(pages.nbytes for pages in runner.kv_pages())
        available = available_bytes(runner.device)
        if needed > available:
            raise MemoryShortage(
                f"cannot restore the model: {needed} bytes are needed, {available} are available"
            )
        self._runner = None
        try:
            copy.restore()
        except OSError as error:
            log.warning("cannot read the copy of the weights: %s; the model is loaded anew", error)
            self._copy, self._weight_regions = None, list
            return None
        return runner
