"""The scan for secrets finds each form that it knows, where it stands, and nothing else."""

import subprocess
from pathlib import Path

import pytest

from isochrone.wire.client_keys.keys import format_key
from isochrone.wire.ids import KeyId
from ops import secret_scan
from ops.secret_scan import ALLOWED, FORMS, find_secrets, scan, tracked_files

LETTERS = "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zAbCdEfGhIjKlMnOp"

SECRETS = {
    "a private key": f"-----BEGIN EC PRIVATE KEY-----\n{LETTERS}\n{LETTERS}\n",
    "an AWS key id": "AKIA" + LETTERS[:16].upper(),
    "a GitHub token": "ghp_" + LETTERS[:36],
    "a GitLab token": "glpat-" + LETTERS[:20],
    "a Hugging Face token": "hf_" + LETTERS[:34],
    "an npm token": "npm_" + LETTERS[:36],
    "a PyPI token": "pypi-AgEI" + LETTERS + LETTERS[:10],
    "an API key": "sk-" + "proj-" + LETTERS,
    "a Google API key": "AIza" + LETTERS[:35],
    "a Slack token": "xoxb-" + LETTERS[:24],
    "a JSON web token": f"eyJ{LETTERS[:20]}.eyJ{LETTERS[:20]}.{LETTERS}",
    "a password in a URL": "postgres" + "ql://user:" + LETTERS[:12] + "@db/isochrone",
    "an Isochrone key": format_key(KeyId("k1234567890a"), bytes(range(32))),
}


def test_each_form_has_an_example() -> None:
    assert SECRETS.keys() == FORMS.keys()


@pytest.mark.parametrize("form", SECRETS)
def test_a_secret_is_found_with_its_line_unless_it_is_allowed(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = f"first line\nvalue = '{SECRETS[form]}'\n".encode()
    found = list(find_secrets("a.py", contents))
    assert [(one.file, one.line, one.form) for one in found] == [("a.py", 2, form)]
    monkeypatch.setitem(ALLOWED, "a.py", frozenset({found[0].sha256}))
    assert not list(find_secrets("a.py", contents))
    assert list(find_secrets("b.py", contents))


def test_what_only_begins_like_a_secret_is_not_found() -> None:
    texts = (
        "-----BEGIN PRIVATE KEY-----\\n...",
        "postgresql://user:$PASSWORD@db http://[::1]:80/@cf/model",
        "hf_url sk-short ghp_x AKIA",
        SECRETS["an Isochrone key"][:-1] + "_",
        "-----BEGIN CERTIFICATE-----\n" + LETTERS,
    )
    for text in texts:
        assert not list(find_secrets("a.md", text.encode())), text


def test_files_that_git_does_not_ignore_are_scanned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(("git", "init", "-q", tmp_path), check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    for name in ("ignored", "new"):
        (tmp_path / name).write_text(SECRETS["a GitHub token"])
    (tmp_path / "binary").write_bytes(b"\0" + SECRETS["a GitHub token"].encode())
    names = tracked_files(tmp_path)
    assert [finding.file for finding in scan(tmp_path, names)] == ["new"]
    monkeypatch.setattr(secret_scan, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["secret_scan"])
    assert secret_scan.main() == 1
    printed = capsys.readouterr()
    assert SECRETS["a GitHub token"] not in printed.out + printed.err
    (tmp_path / "new").unlink()
    assert secret_scan.main() == 0
