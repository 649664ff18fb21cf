"""Find secrets in the files that git tracks: `python -m ops.secret_scan [FILE ...]`.

The scan knows the forms of keys and tokens that have one, private keys in PEM, and passwords in
URLs. ALLOWED names texts that are no secrets, by file and the SHA-256 of the text, so that another
text in the same file is still found. The scan prints the place of each finding, never the text, and
exits with 1.
"""

import argparse
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from isochrone.wire.client_keys.keys import parse_key

ROOT: Final = Path(__file__).parents[1]
FILE_BYTES_MAX: Final = 4 * 1024 * 1024

FORMS: Final[dict[str, re.Pattern[bytes]]] = {
    "a private key": re.compile(
        rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----\s+[A-Za-z0-9+/=\s]{40,}"
    ),
    "an AWS key id": re.compile(rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    "a GitHub token": re.compile(rb"\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_\w{60,}\b"),
    "a GitLab token": re.compile(rb"\bglpat-[\w-]{20,}"),
    "a Hugging Face token": re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b"),
    "an npm token": re.compile(rb"\bnpm_[A-Za-z0-9]{36}\b"),
    "a PyPI token": re.compile(rb"\bpypi-AgEI[\w-]{50,}"),
    "an API key": re.compile(rb"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{32,}\b"),
    "a Google API key": re.compile(rb"\bAIza[A-Za-z0-9_-]{35}\b"),
    "a Slack token": re.compile(rb"\bxox[abprs]-[A-Za-z0-9-]{20,}"),
    "a JSON web token": re.compile(rb"\beyJ[\w-]{15,}\.eyJ[\w-]{15,}\.[\w-]{20,}"),
    "a password in a URL": re.compile(
        rb"\b[a-z][a-z0-9+]{2,}://[^\s/:@'\"{}<>]+:[^\s/@'\"{}<>$]{6,}@"
    ),
    "an Isochrone key": re.compile(rb"\biso_[A-Za-z0-9]+_[A-Za-z0-9]{43}_[A-Za-z0-9]{6}\b"),
}

ALLOWED: Final[dict[str, frozenset[str]]] = {
    # The Postgres of the machine that tries the units.
    "ops/systemd/walk.sh": frozenset(
        {"d90e3e31eee34f28d175229e00af94ff270138619c4a3a486667a028f05a8dab"}
    ),
}
"""For each file, the SHA-256 of texts in it that only look like secrets."""


class Finding(NamedTuple):
    """A text with the form of a secret, and where it is."""

    file: str
    line: int
    form: str
    sha256: str


def tracked_files(root: Path) -> list[str]:
    """Return the names of the files that git tracks, or would track once they are added."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout
    return [name for name in listed.decode().split("\0") if name]


def find_secrets(name: str, contents: bytes) -> Iterator[Finding]:
    """Yield what in a file has the form of a secret and is not allowed."""
    if b"\0" in contents[:8192]:
        return  # a binary file
    for form, pattern in FORMS.items():
        for match in pattern.finditer(contents):
            text = match.group()
            if form == "an Isochrone key" and parse_key(text.decode()) is None:
                continue
            sha256 = hashlib.sha256(text).hexdigest()
            if sha256 not in ALLOWED.get(name, ()):
                line = contents.count(b"\n", 0, match.start()) + 1
                yield Finding(name, line, form, sha256)


def scan(root: Path, names: Sequence[str]) -> list[Finding]:
    """Return what is found in these files."""
    found: list[Finding] = []
    for name in names:
        path = root / name
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= FILE_BYTES_MAX:
            found += find_secrets(name, path.read_bytes())
    return found


def main() -> int:
    """Scan, print the findings, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="relative to the root; all tracked files if none")
    names = parser.parse_args().files or tracked_files(ROOT)
    findings = scan(ROOT, names)
    for finding in findings:
        print(
            f"{finding.file}:{finding.line}: {finding.form}; if it is none, allow"
            f" {finding.sha256} in ops/secret_scan.py"
        )
    print(f"{len(names)} files scanned, {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
