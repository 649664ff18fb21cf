"""What the router takes of a body for the prompt that it will become."""

import pytest

from router.apis.openai.decode import CHAT, decode

TOOLS = b'[{"type":"function","function":{"name":"f"}}]'


@pytest.mark.parametrize(
    ("rest", "begins"),
    [
        (b"", b"\0user\0hi"),
        (b',"tools":' + TOOLS, TOOLS + b"\0user\0hi"),
        (b',"tool_choice":"auto","response_format":{"type":"json_object"}', b"\0user\0hi"),
    ],
)
def test_tools_count_as_the_beginning_of_the_prompt(rest: bytes, begins: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]' + rest + b"}"
    request = decode(body, CHAT)
    assert request.rendered == begins
    assert request.text_bytes(len(request.rendered)) > len(begins)
