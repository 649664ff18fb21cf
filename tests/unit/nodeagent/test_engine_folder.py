"""The folders of an engine: made for it, and removed with it."""

import socket
import tempfile
from pathlib import Path

import pytest

from nodeagent.host.engines.engine_folder import (
    SOCKET_NAME_BYTES,
    SOCKET_PATH_BYTES_MAX,
    make_folders,
    remove_folders,
    temporary_folder,
    temporary_variables,
)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))


@pytest.mark.parametrize("letters", [1, 200])
def test_nothing_of_an_engine_is_left(tmp_path: Path, letters: int) -> None:
    """Also where the folder for temporary files is elsewhere, and after an agent's crash."""
    folder = tmp_path / ("r" * letters)
    for _ in range(2):
        temporary = make_folders(folder)
        assert list(temporary.iterdir()) == []
        assert temporary.stat().st_mode & 0o777 == 0o700
        (temporary / "socket").touch()
    remove_folders(folder)
    (compiled,) = tmp_path.iterdir()
    assert compiled.name.startswith("torchinductor"), "all engines use it"


def test_sockets_have_paths_of_at_most_107_bytes() -> None:
    seen = set()
    for letters in range(1, 120):
        folder = Path("/var/lib/isochrone/node/engines", "é" * letters)
        temporary = temporary_folder(folder)
        seen.add(temporary.parent == folder)
        if temporary.parent == folder:
            assert len(bytes(temporary / ("n" * SOCKET_NAME_BYTES))) <= SOCKET_PATH_BYTES_MAX
    assert seen == {True, False}


def test_a_long_host_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM with Mooncake Store has it in the name of a socket."""
    folder = Path("/var/lib/isochrone/node/engines/chat-1-1")
    assert temporary_folder(folder) == folder / "tmp"
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 60)
    assert temporary_folder(folder) != folder / "tmp"


def test_engines_do_not_share_a_folder(tmp_path: Path) -> None:
    names = [f"{'r' * 120}-{number}" for number in range(3)]
    assert len({temporary_folder(tmp_path / name) for name in names}) == len(names)


def test_a_folder_of_another_owner_is_not_used(tmp_path: Path) -> None:
    """A link in its place would lead an engine's sockets to wherever another user likes."""
    folder = tmp_path / ("r" * 200)
    (tmp_path / "theirs").mkdir()
    temporary_folder(folder).symlink_to(tmp_path / "theirs")
    with pytest.raises(FileExistsError):
        make_folders(folder)


def test_what_torch_compiles_outlives_the_engine(tmp_path: Path) -> None:
    temporary = make_folders(tmp_path / "r")
    variables = temporary_variables(temporary)
    assert variables["TMPDIR"] == str(temporary)
    assert not Path(variables["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path / "r")
