"""What a benchmark reads of a streamed answer."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from ops.bench.streamed_answer import StreamedChat, read_chat

ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n'
TEXT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n'
END = b"data: [DONE]\n"


def read(*lines: bytes) -> StreamedChat:
    async def stream() -> AsyncIterator[bytes]:
        for line in lines:
            yield line

    return asyncio.run(read_chat(stream()))


def test_an_answer_has_the_times_of_its_text_and_its_usage() -> None:
    answer = read(b": ping\n", ROLE, TEXT, b"\n", TEXT, USAGE, END)
    assert 0 < answer.first_at_s <= answer.last_at_s
    assert answer.usage == {"prompt_tokens": 7, "completion_tokens": 2}


def test_an_answer_without_text_is_no_measurement() -> None:
    with pytest.raises(SystemExit, match="has no text"):
        read(ROLE, USAGE, END)
