"""A release's list and signature, checked by the tools that docs/operations.md names."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ops.packaging.release_sums import NAMESPACE, CannotSign, sign_sums, signature_of, write_sums

needs_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def a_release(folder: Path) -> Path:
    """Write two wheels, another file that is no part of the release, and the list."""
    for name in ("b.whl", "a.whl", "older.whl"):
        (folder / name).write_text(name)
    return write_sums(folder, [folder / "b.whl", folder / "a.whl"])


def a_key(path: Path) -> Path:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True
    )
    return path


def is_whole(sums: Path) -> bool:
    command = ["sha256sum", "--check", "--strict", "--quiet", sums.name]
    return subprocess.run(command, cwd=sums.parent, check=False).returncode == 0


def is_signed(sums: Path, key: Path) -> bool:
    """Verify as a user does, who has the public key from another channel."""
    public = key.with_suffix(".pub").read_text()
    (signers := sums.with_name("release_signers")).write_text(f"isochrone {public}")
    command = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "isochrone"]
    with sums.open() as signed:
        options = ["-n", NAMESPACE, "-s", str(signature_of(sums))]
        return subprocess.run([*command, *options], stdin=signed, check=False).returncode == 0


def test_the_list_names_the_files_of_this_release_only(tmp_path: Path) -> None:
    sums = a_release(tmp_path)
    assert [line.split("  ")[1] for line in sums.read_text().splitlines()] == ["a.whl", "b.whl"]
    assert is_whole(sums)
    (tmp_path / "older.whl").write_text("?")
    assert is_whole(sums)
    (tmp_path / "a.whl").write_text("a.whL")
    assert not is_whole(sums)


@needs_ssh
def test_a_signature_verifies_until_a_byte_changes(tmp_path: Path) -> None:
    sums, key, other = a_release(tmp_path), a_key(tmp_path / "key"), a_key(tmp_path / "other")
    assert sign_sums(sums, key) == signature_of(sums)
    assert is_signed(sums, key)
    assert not is_signed(sums, other)
    text = sums.read_text()
    sums.write_text(text.replace("a.whl", "c.whl"))
    assert not is_signed(sums, key)
    sums.write_text(text)
    assert is_signed(sums, key)


@needs_ssh
def test_an_old_signature_does_not_stay_beside_a_new_list(tmp_path: Path) -> None:
    sums = a_release(tmp_path)
    sign_sums(sums, a_key(tmp_path / "key"))
    write_sums(tmp_path, [tmp_path / "older.whl"])
    assert not signature_of(sums).exists()
    with pytest.raises(CannotSign, match=r"cannot sign with .*nokey"):
        sign_sums(sums, tmp_path / "nokey")
