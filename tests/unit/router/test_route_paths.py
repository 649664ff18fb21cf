"""The header `Allow` names the methods of a path, and of no other one."""

import pytest

from router.apis.document.route_paths import allow_line


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
