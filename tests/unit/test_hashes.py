"""What was installed is compared with the hashes that are pinned."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from isochrone import __version__
from ops.packaging import build_wheel, hashes

KNOWN = next(iter(hashes.known_hashes()))
OTHER = "0" * 64


def installed(name: str, download: dict[str, Any]) -> dict[str, Any]:
    source = {"url": f"https://example.net/{name}.whl", **download}
    return {"metadata": {"name": name, "version": "1.0"}, "download_info": source}


def archive(digest: str) -> dict[str, Any]:
    return {"archive_info": {"hash": f"sha256={digest}"}}


def a_report(folder: Path, *items: dict[str, Any]) -> str:
    path = folder / "report.json"
    path.write_text(json.dumps({"install": list(items)}))
    return str(path)


def test_known_files_and_the_project_itself_pass(tmp_path: Path) -> None:
    project = installed("isochrone", {"dir_info": {"editable": True}})
    hashes.check([a_report(tmp_path, project, installed("known", archive(KNOWN)))])


def test_a_wheel_of_the_project_is_checked_by_its_own_list(tmp_path: Path) -> None:
    wheel = installed("isochrone", archive(OTHER) | {"url": "file:///dist/isochrone.whl"})
    hashes.check([a_report(tmp_path, wheel | {"is_direct": True})])
    for item in (wheel, installed("isochrone", archive(OTHER)) | {"is_direct": True}):
        with pytest.raises(SystemExit, match=r"isochrone 1\.0"):
            hashes.check([a_report(tmp_path, item)])


@pytest.mark.parametrize(
    "download", [archive(OTHER), {"archive_info": {}}, {"vcs_info": {"commit_id": KNOWN}}]
)
def test_every_other_file_is_named(tmp_path: Path, download: dict[str, Any]) -> None:
    report = a_report(tmp_path, installed("known", archive(KNOWN)), installed("evil", download))
    with pytest.raises(SystemExit, match=r"evil 1\.0 from https://example\.net/evil\.whl"):
        hashes.check([report])


def test_every_pinned_version_has_a_hash() -> None:
    known = {hashes.normal(file.split("-")[0]): file for file in hashes.known_hashes().values()}
    for name, version in hashes.pinned().items():
        assert re.search(rf"-{re.escape(version)}(\+cpu)?-", known[name]), name


def test_wheels_that_linux_may_install_are_listed() -> None:
    assert hashes.serves("a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl")
    assert hashes.serves("a-1-cp38-abi3-musllinux_1_2_aarch64.whl")
    assert hashes.serves("a-1-py3-none-any.whl")
    assert not hashes.serves("a-1-cp311-cp311-macosx_11_0_arm64.whl")
    assert not hashes.serves("a-1-cp313-cp313t-manylinux_2_17_x86_64.whl")
    assert not hashes.serves("a-1-cp310-cp310-manylinux_2_17_x86_64.whl")
    assert not hashes.serves("a-1.tar.gz")


def test_nothing_is_built_with_tools_that_are_not_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **options: Any) -> None:
        ran.append(command)
        if "--report" in command:
            report = Path(command[command.index("--report") + 1])
            report.write_text(json.dumps({"install": [installed("evil", archive(OTHER))]}))

    monkeypatch.setattr("ops.packaging.build_wheel.subprocess.run", run)
    with pytest.raises(SystemExit, match="evil"):
        build_wheel.build_wheel(tmp_path, "python3", tmp_path / "out", tmp_path)
    (install,) = [command for command in ran if "install" in command]
    assert install == ran[-1]
    assert install[install.index("--only-binary") + 1] == ":all:"


def test_the_version_of_a_wheel_names_its_commit(tmp_path: Path) -> None:
    """pip does not install a wheel over another one of the same version."""
    module = tmp_path / "isochrone" / "__init__.py"
    module.parent.mkdir()
    module.write_text((build_wheel.ROOT / "isochrone" / "__init__.py").read_text())
    build_wheel.stamp_version(tmp_path)
    stamped = rf'^__version__ = "{re.escape(__version__)}\+g[0-9a-f]{{12,}}(\.changed)?"$'
    assert re.search(stamped, module.read_text(), re.MULTILINE)
    assert build_wheel.version_of("1.0", "c0ffee", has_changes=False) == "1.0+gc0ffee"
