"""The header `Allow` has the methods of a path; an unknown path may be one of a wrong base URL."""

import pytest

from router.apis.document.route_paths import allow_line, intended_path


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/responses/input_tokens", "POST"),
        ("/v1/responses/resp_1", "GET, DELETE"),
        ("/ai/finetunes/public", "GET"),
        ("/client/v4/accounts/a/ai/finetunes/public", "GET"),
        ("/ai/run/@cf/meta/x", "POST"),
        ("/v1/nothing", "GET, POST, DELETE"),
    ],
)
def test_a_path_allows_its_own_methods(path: str, methods: str) -> None:
    assert allow_line(path) == f"allow: {methods}, OPTIONS\r\n"


@pytest.mark.parametrize(
    ("path", "intended"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/models/tiny", "/v1/models/tiny"),
        ("/accounts/a/ai/run/@cf/meta/x", "/client/v4/accounts/a/ai/run/@cf/meta/x"),
        ("/v1/accounts/a/ai/models/search", "/client/v4/accounts/a/ai/models/search"),
        ("//v1//chat/completions/", "/v1/chat/completions"),
        ("/v1/fine_tuning/jobs", ""),
        ("/v1/containers/c/files", ""),
        ("/v1", ""),
        ("/", ""),
    ],
)
def test_the_path_that_a_client_with_a_wrong_base_url_meant(path: str, intended: str) -> None:
    assert intended_path(path) == intended
