"""Processes are found in /proc whatever their names are."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.host.engines.engine_ports import other_listener
from nodeagent.host.processes import group_members, is_alive, start_time

CUT_NAME = "éééééééé".encode()[:15]
"""The kernel keeps 15 bytes of a name."""


@pytest.fixture(autouse=True)
def cut_name() -> Iterator[None]:
    """Give this process a name that ends within a character."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(CUT_NAME)
    assert name.read_bytes() == CUT_NAME + b"\n"
    yield
    name.write_bytes(before)


def test_a_process_whose_name_is_no_text_is_found() -> None:
    """Any process of the machine may have such a name, and engines were killed for it."""
    assert os.getpid() in group_members(os.getpgrp())
    assert is_alive(os.getpid(), start_time(os.getpid()))


def test_a_listener_whose_name_is_no_text_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        named = other_listener(listener.getsockname()[1], group=0)
    assert named == f"process {os.getpid()} (ééééééé\ufffd)"
