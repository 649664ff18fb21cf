"""Usage is on disk before a client has all of its answer: a router may be killed then."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from router.recording.journal_file import JournalFile
from tests.integration.router.fleet_of import KEY, a_bench

PEEKED_BYTES_MAX = 1 << 16


def a_request(body: dict[str, Any]) -> bytes:
    content = json.dumps({"model": "tiny", **body}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "complete response"])
@pytest.mark.parametrize("tokens", [1, 30])
async def test_usage_is_written_before_the_last_bytes_of_an_answer(
    tmp_path: Path, is_stream: bool, tokens: int
) -> None:
    received_before: list[bytes] = []

    class LookingFile:
        """A journal's file that looks what the client has before it takes a row."""

        def __init__(self, file: JournalFile) -> None:
            self.close = file.close
            self._append = file.append

        def append(self, row: bytes) -> None:
            try:
                received_before.append(client.recv(PEEKED_BYTES_MAX, socket.MSG_PEEK))
            except BlockingIOError:
                received_before.append(b"")
            self._append(row)

    async with a_bench(tmp_path, usage_interval_s=3600) as bench:
        with socket.create_connection(("127.0.0.1", bench.app.port)) as client:
            client.setblocking(False)
            journal = bench.app.journal
            assert journal._file is not None
            journal._file = LookingFile(journal._file)
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "stream": is_stream,
                "max_tokens": tokens,
            }
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, a_request(body))
            while not received_before:
                await asyncio.sleep(0.01)
            answer, end = b"", b"data: [DONE]\n\n\r\n0\r\n\r\n" if is_stream else b"}"
            while not answer.endswith(end):
                answer += await loop.sock_recv(client, PEEKED_BYTES_MAX)
    (before,) = received_before
    assert b"[DONE]" not in before
    assert before == b"" or is_stream
