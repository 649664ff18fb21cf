"""The list of a release's files with their SHA-256, and its signature, for tools that Debian has.

`sha256sum --check` reads the list, `ssh-keygen -Y verify` its signature.
"""

import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SUMS_NAME: Final = "SHA256SUMS"
NAMESPACE: Final = "isochrone-release"
"""The signature's namespace: a key's signature of anything else does not verify as a release."""


class CannotSign(Exception):
    """The list cannot be signed; the message says why."""


def write_sums(folder: Path, files: Sequence[Path]) -> Path:
    """Write the list of `files`, which lie in `folder`, and delete an earlier list's signature."""
    sums = folder / SUMS_NAME
    signature_of(sums).unlink(missing_ok=True)
    lines = (
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(set(files))
    )
    sums.write_text("".join(lines))
    return sums


def sign_sums(sums: Path, key: Path) -> Path:
    """Sign a list with a private SSH key; return the signature's path. Raises CannotSign."""
    command = ["ssh-keygen", "-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE, str(sums)]
    try:
        # The terminal stays its input: it asks there for the passphrase of a key that has one.
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise CannotSign(f"cannot run ssh-keygen: {error.strerror}") from error
    if done.returncode != 0 or not signature_of(sums).exists():
        raise CannotSign(f"cannot sign with {key}: {done.stderr.strip() or 'ssh-keygen failed'}")
    return signature_of(sums)


def signature_of(sums: Path) -> Path:
    """Return where ssh-keygen writes the signature of a list."""
    return sums.with_name(f"{sums.name}.sig")
