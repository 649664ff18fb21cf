"""Ends a step early, between two layers, because something more urgent came.

One thread sets it, another computes the step. The C kernels read the same memory.
"""

from ctypes import addressof, c_int64


class StepInterrupted(Exception):
    """The step was not computed to its end: it has no logits, and may be computed again."""


class StepInterrupt:
    """A flag that the layers of a step read."""

    def __init__(self) -> None:
        self._flag = c_int64(0)
        self.address = addressof(self._flag)
        """Where C reads it: not 0 if the step is to end."""

    @property
    def is_set(self) -> bool:
        """Whether the step is to end."""
        return self._flag.value != 0

    def set(self) -> None:
        """End the step that runs, or else the next one that may be interrupted."""
        self._flag.value = 1

    def clear(self) -> None:
        """Let steps run to their end."""
        self._flag.value = 0

    def check(self) -> None:
        """Raise StepInterrupted if the step is to end."""
        if self._flag.value:
            raise StepInterrupted
