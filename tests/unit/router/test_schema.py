"""What the router counts of a body before it goes on."""

import pytest

from router.apis.openai.decode import CHAT, decode

TOOLS = b'[{"type":"function","function":{"name":"f"}}]'


@pytest.mark.parametrize(
    ("rest", "wanted"),
    [
        (b"", 18),
        (b',"tools":' + TOOLS, 18 + len(TOOLS)),
        (b',"tool_choice":"auto","response_format":{"type":"json_object"}', 18),
    ],
)
def test_tools_count_as_text_of_the_prompt(rest: bytes, wanted: int) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]' + rest + b"}"
    assert decode(body, CHAT).text_bytes == wanted
