"""Errors of engines reach the client in one shape, with a code for programs."""

import json
from typing import Any

import pytest

from isochrone.wire.errors import ApiError
from router.dataplane.response_checks import client_error_body

OURS = {"message": "cannot", "type": "invalid_request_error", "param": "x", "code": "conflict"}
VLLM = "max_tokens=5000 cannot be greater than max_model_len=4096. Please request fewer"
SGLANG = "The input (9 tokens) is longer than the model's context length (8 tokens)."
TENSORRT = "The sum of prompt length (9.0), query length (0) should not exceed max_num_tokens (8)"
LLAMA_CPP = "request (5031 tokens) exceeds the available context size (4096 tokens), try it"


@pytest.mark.parametrize(
    ("status", "engine", "message", "code", "param"),
    [
        (400, {"error": {"message": VLLM, "type": "BadRequestError", "param": "max_tokens",
          "code": 400}}, VLLM, "context_length_exceeded", "max_tokens"),
        (400, {"error": {"message": "bad seed", "type": "BadRequestError", "param": None,
          "code": 400}}, "bad seed", "invalid_request", None),
        (400, {"object": "error", "message": SGLANG, "type": "BadRequestError", "param": None,
          "code": 400}, SGLANG, "context_length_exceeded", None),
        (400, {"error": {"code": 400, "message": LLAMA_CPP, "type": "exceed_context_size_error",
          "n_ctx": 4096}}, LLAMA_CPP, "context_length_exceeded", None),
        (400, {"object": "error", "message": TENSORRT, "type": "BadRequestError", "param": None,
          "code": 400}, TENSORRT, "context_length_exceeded", None),
        (422, {"detail": [{"loc": ["n"]}]}, '[{"loc":["n"]}]', "invalid_request", None),
        (404, {"detail": "Not Found"}, "Not Found", "not_found", None),
        (413, {"error": "too large"}, "too large", "request_too_large", None),
        (429, {"error": {"message": "busy", "code": None}}, "busy", "out_of_capacity", None),
        (400, {"error": {"code": "adapter_incomplete", "message": "bad", "param": "model"}}, "bad",
         "adapter_incomplete", "model"),
        (400, {"error": {"code": "E17", "message": "bad"}}, "bad", "invalid_request", None),
    ],
    ids=["vllm length", "vllm", "sglang", "llama.cpp", "tensorrt_llm", "fastapi", "path", "text",
         "busy", "node", "unknown code"],
)  # fmt: skip
def test_an_engines_error_gets_our_shape(
    status: int, engine: dict[str, Any], message: str, code: str, param: str | None
) -> None:
    error = json.loads(client_error_body(json.dumps(engine).encode(), status))["error"]
    assert (error["message"], error["code"], error["param"]) == (message, code, param)
    kind = "server_error" if status == 429 else "invalid_request_error"
    assert error["type"] == kind


def test_an_error_with_a_code_and_a_type_is_unchanged() -> None:
    body = json.dumps({"error": OURS, "detail": 1}).encode()
    assert client_error_body(body, 400) is body


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"error":{"code":400}}', b"1"])
def test_an_error_without_a_reason_says_so(body: bytes) -> None:
    with pytest.raises(ApiError, match="status 400 and no reason"):
        client_error_body(body, 400)
