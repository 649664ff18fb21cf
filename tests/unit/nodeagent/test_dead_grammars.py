"""Grammars that no token can follow: most are refused, and the others are the client's fault."""

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from isochrone.wire.engines.schema_recursion import RECURSION_MAX
from isochrone.wire.errors import ApiError
from nodeagent.api.request.answer_relay import refuse_grammar, with_grammar_blamed
from nodeagent.drivers.llama_cpp import GRAMMAR_ERROR
from nodeagent.drivers.request_body import PLAIN, with_fields
from router.dataplane.sse import classify, is_request_error


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"minLength": 5, "maxLength": 2}, "minLength above its maxLength"),
        ({"items": {"minItems": 2, "maxItems": 1}}, "minItems above its maxItems"),
        ({"minLength": 2, "maxLength": 2, "maxItems": True}, ""),
        ({"pattern": "^a{3,1}$"}, r"repetition {3,1} are in the wrong order"),
        ({"pattern": r"^a\{3,1}{1,3}$"}, ""),
        ({"pattern": r"^[^\x00-\U0010FFFF]$"}, "no character is in the class"),
        ({"pattern": r"^[^\x00-\uFFFF]$"}, ""),
        ({"pattern": r"^a\x00$"}, "no token has the character"),
        ({"pattern": r"^a\\x00$"}, ""),
        ({"pattern": '^"<[a-z]+> #1"$'}, ""),
        ('root ::= "a" [^\\x00-\\U0010FFFF]', "no character is in the class"),
        (r"root ::= [^\x00-b\x63-\U0010FFFF]", "no character is in the class"),
        (r"root ::= [\x00]", "no character is in the class"),
        ("root ::= [b-a]", "no character is in the class"),
        (r"root ::= [\U00110000]", "no character is in the class"),
        (r'root ::= "\x00"', "no token has the character"),
        (r'root ::= "\U00110000"', "no token has the character"),
        (r'root ::= "\U0010FFFF\\x00"', ""),
        ('root ::= "' + r"\x00" * 1000, "no token has the character"),
        ("root ::= " + "[" * 30_000, ""),
        ("root ::= " + '"\\' * 15_000, ""),
        ('root ::= "' + "a" * 32_768, "more than 32768 characters"),
        ('root ::= "a" <[2]>', "names a token"),
        ('root ::= "a" !<end>', "names a token"),
        ('root ::= "a"{2, 1}', "in the wrong order"),
        (r"""root ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" ["\\bfnrt])* "\"" # <a> [b-a]""", ""),
        (r"root ::= [\t\]\-a-] [-] [^]", ""),
    ],
)
def test_a_grammar_that_no_token_can_follow_is_refused(value: Any, problem: str) -> None:
    """With `top_k` 1 such a request ended the server, and a wrong repetition took all memory."""
    command = msgspec.structs.replace(PLAIN, schema_recursion_max=RECURSION_MAX)
    name = "grammar" if isinstance(value, str) else "json_schema"
    data = msgspec.json.encode({name: value})
    if not problem:
        assert with_fields(data, {}, command) == data
        return
    with pytest.raises(ApiError, match=re.escape(f"cannot use field '{name}': ")) as refused:
        with_fields(data, {}, command)
    assert problem in refused.value.message
    assert refused.value.param == name


async def test_a_grammar_that_ends_an_answer_is_the_clients_fault() -> None:
    """Routers tried all replicas, and took each for a failed one."""
    stack = b"got exception: Unexpected empty grammar stack after accepting piece: . (30)"
    error = b'{"error":{"code":500,"message":"%s","type":"server_error"}}' % stack
    with pytest.raises(ApiError, match="no token fits it"):
        refuse_grammar(500, error, GRAMMAR_ERROR)
    refuse_grammar(200, error, GRAMMAR_ERROR)
    refuse_grammar(500, b'{"error":{}}', GRAMMAR_ERROR)
    refuse_grammar(500, error, PLAIN.grammar_error)
    token = b'data: {"choices":[]}\n\n'

    async def chunks() -> AsyncIterator[bytes]:
        yield token
        yield token + b"data: " + error + b"\n\n"

    sent = [chunk async for chunk in with_grammar_blamed(chunks(), GRAMMAR_ERROR)]
    assert sent[0] == token
    assert sent[1].startswith(token + b"data: ")
    assert sent[1].endswith(b"\n\n")
    kind = classify(sent[1][len(token) :])
    assert kind.is_error
    assert is_request_error(kind.body)
