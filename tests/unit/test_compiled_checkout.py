"""The compiled request path of a checkout is loaded only if it was made from these very sources."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from isochrone import compiled
from ops.packaging import compile_request_path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a few sources of the request path, compiled."""
    for name in (
        "setup.py",
        "isochrone/wire/client_keys/keys.py",
        "isochrone/wire/geo.py",
        "router/recording/record.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    compiled.folder(tmp_path).mkdir(parents=True)
    return tmp_path


def origin(checkout: Path, module: str) -> str | None:
    spec = compiled.CompiledRequestPath(checkout).find_spec(module, None)
    return None if spec is None else spec.origin


def test_the_modules_of_the_request_path_are_found_in_the_build(checkout: Path) -> None:
    found = origin(checkout, "router.recording.record")
    assert found is not None and Path(found).is_relative_to(compiled.folder(checkout))
    assert origin(checkout, "isochrone.wire.client_keys.keys") is not None
    assert origin(checkout, "router__mypyc") is not None
    assert origin(checkout, "isochrone.wire.http.body_bytes") is not None
    # Neither of these is compiled.
    assert origin(checkout, "isochrone.wire.geo") is None
    assert origin(checkout, "json") is None


@pytest.mark.parametrize(
    "name", ["router/recording/record.py", "isochrone/wire/geo.py", "setup.py"]
)
def test_an_edited_source_is_never_hidden_by_a_stale_build(checkout: Path, name: str) -> None:
    # Constants of wire/geo.py may have been built into compiled modules.
    path = checkout / name
    before = path.read_text()
    path.write_text("# edited\n")
    assert origin(checkout, "router.recording.record") is None
    path.write_text(before)
    assert origin(checkout, "router.recording.record") is not None


def test_a_new_source_makes_a_build_stale(checkout: Path) -> None:
    (checkout / "router" / "new.py").write_text("")
    assert origin(checkout, "router.recording.record") is None


def test_a_build_that_must_be_there_is_missed_at_once(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "router" / "record.py").write_text("# edited\n")
    monkeypatch.setenv(compiled.SETTING, "1")
    with pytest.raises(ImportError, match="these sources are not compiled"):
        origin(checkout, "router.recording.record")


def test_of_several_processes_one_compiles_and_the_others_wait(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "router" / "record.py").write_text("# edited\n")
    (checkout / "pyproject.toml").write_text("")
    compiled_copies = []

    def compile_copy(copy: Path, out: Path, *, is_profiled: bool) -> None:
        compiled_copies.append(copy)
        out.mkdir()

    monkeypatch.setattr(compile_request_path, "compile_copy", compile_copy)
    with ThreadPoolExecutor(4) as threads:
        built = set(threads.map(compile_request_path.compile_checkout, [checkout] * 4))
    assert built == {compiled.folder(checkout)}
    assert len(compiled_copies) == 1


def test_modules_without_a_profile_are_replaced_once_by_those_with_one(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "pyproject.toml").write_text("")
    compilations = []

    def compile_copy(copy: Path, out: Path, *, is_profiled: bool) -> None:
        compilations.append(is_profiled)
        out.mkdir()
        (out / str(is_profiled)).touch()

    monkeypatch.setattr(compile_request_path, "compile_copy", compile_copy)
    (checkout / "router" / "record.py").write_text("# edited\n")
    for is_profiled in (False, True, True, False):
        built = compile_request_path.compile_checkout(checkout, is_profiled=is_profiled)
    assert compilations == [False, True]
    assert built == compiled.folder(checkout)
    assert (built / "True").exists()
    assert not (built / "False").exists()


def test_the_setting_may_name_a_folder_of_extension_modules(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "router" / "record.py").write_text("# edited\n")
    finder = compiled.CompiledRequestPath(checkout, tmp_path)
    spec = finder.find_spec("router.recording.record", None)
    assert spec is not None
    assert spec.origin == str(tmp_path / f"router/recording/record{EXTENSION_SUFFIXES[0]}")


def test_make_compiled_says_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built = compile_request_path.ROOT / "build" / "request_path" / "d"
    monkeypatch.setattr(compile_request_path, "compile_checkout", lambda _, is_profiled: built)
    monkeypatch.setattr(sys, "argv", ["compile", "--required"])
    compile_request_path.main()
    assert capsys.readouterr().err.endswith("is compiled: build/request_path/d\n")
