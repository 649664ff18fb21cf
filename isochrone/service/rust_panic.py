"""Panics of libraries that are written in Rust, such as tokenizers and llguidance."""

from typing import Final

_MODULE: Final = "pyo3_runtime"
"""The module of PanicException, which cannot be imported."""


def is_rust_panic(error: BaseException) -> bool:
    """Say whether a library failed by a bug of its own.

    A panic is no `Exception`, but it ends neither the thread nor the process.
    """
    return type(error).__module__ == _MODULE
