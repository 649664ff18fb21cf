"""Runs a script of a client library in a process of its own."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

TIMEOUT_S: Final = 120.0


async def run_script(
    command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str], stdin: IO[bytes] | None
) -> dict[str, Any]:
    """Return the JSON object that a command prints. Raises AssertionError if the command fails."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=env,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(TIMEOUT_S):
        printed, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    result: dict[str, Any] = json.loads(printed)
    return result
