"""The garbage collections of the integration tests."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> Iterator[None]:
    """Let routers walk only what a file of tests makes, not all that is imported here.

    Each router collects and freezes all objects when it starts, and unfreezes them when it ends:
    a fifth of a second for each test. Here the end of the file unfreezes them.
    """
    unfreeze = gc.unfreeze
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    unfreeze()
