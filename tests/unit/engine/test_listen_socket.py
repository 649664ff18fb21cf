"""The engine's socket: that of a dead engine is removed, and no living process loses its own."""

import socket
from pathlib import Path

import pytest

from isochrone.service.config import ConfigError
from nodeagent.engine.server.listen_socket import clear_socket


def test_the_socket_of_a_dead_engine_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    clear_socket(path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    clear_socket(path)
    assert not path.exists()


def test_the_socket_of_a_living_process_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        with pytest.raises(ConfigError, match="another process serves it"):
            clear_socket(path)
    assert path.is_socket()


def test_a_process_that_accepts_nothing_keeps_its_socket(tmp_path: Path) -> None:
    """Its queue of connections is full, which is an error of its own on a Unix socket."""
    path = tmp_path / "engine.sock"
    with (
        socket.socket(socket.AF_UNIX) as hung,
        socket.socket(socket.AF_UNIX) as first,
        socket.socket(socket.AF_UNIX) as second,
    ):
        hung.bind(str(path))
        hung.listen(0)
        first.connect(str(path))
        second.setblocking(False)
        with pytest.raises(BlockingIOError):
            second.connect(str(path))
        with pytest.raises(ConfigError, match="another process holds it and does not answer"):
            clear_socket(path)
    assert path.is_socket()


def test_another_file_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    path.write_text("notes")
    with pytest.raises(ConfigError, match="is not a socket"):
        clear_socket(path)
    assert path.read_text() == "notes"
