"""`make up ONESHOT=1`: the demo, with the real model, leaves nothing behind."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ops.fleet.layout import STATE
from tests.system.harness import ROOT, last_words


@pytest.mark.model
async def test_the_demo_succeeds_and_stops_all_processes() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ops.fleet",
        "--oneshot",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    ended = asyncio.create_task(process.communicate())
    await asyncio.wait((ended,), timeout=300)
    if not ended.done():
        process.terminate()
    text = (await ended)[0].decode()
    assert process.returncode == 0, f"{text}\n{last_words(STATE)}"
    assert "one replica, in ams" in text
    assert "after demand grew in sin" in text
    assert "base_url=" not in text, "the fleet has stopped"
    mark = f"{STATE}/".encode()
    left = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes()
            if mark in command:
                left.append(command)
    assert not left
