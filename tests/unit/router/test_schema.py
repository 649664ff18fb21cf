"""What the router counts of a body before it goes on."""

import pytest

from router.apis.openai.decode import CHAT, decode

TOOLS = b'[{"type":"function","function":{"name":"f"}}]'


@pytest.mark.parametrize(
    ("rest", "wanted"),
    [
        (b"", 20),
        (b',"tools":' + TOOLS, 20 + len(TOOLS)),
        (b',"tool_choice":"auto","response_format":{"type":"json_object"}', 20),
    ],
)
def test_tools_count_as_text_of_the_prompt(rest: bytes, wanted: int) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]' + rest + b"}"
    request = decode(body, CHAT)
    assert request.text_bytes(len(request.rendered)) == wanted
