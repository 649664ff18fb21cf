"""Routes that are relayed to the scheduler: unknown ones are refused by the router."""

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from router.apis.batches.relay import check_route
from router.apis.document.routes import ROUTES
from router.apis.responses.stored_routes import is_stored_path

STORED = [
    (route.method, route.path.replace("{", "").replace("}", ""))
    for route in ROUTES
    if route.path.startswith(("/v1/files", "/v1/batches"))
    or (is_stored_path(route.path.replace("{", "").replace("}", "")) and not route.is_inference)
]


@pytest.mark.parametrize(("method", "path"), STORED)
def test_every_documented_route_is_relayed(method: str, path: str) -> None:
    check_route(method, path, path)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/files", "GET, POST"),
        ("POST", "/v1/responses/compact", "GET, DELETE"),
        ("GET", "/v1/batches/b/cancel", "POST"),
        ("DELETE", "/v1/conversations", "POST"),
    ],
)
def test_other_methods_are_refused_with_those_that_exist(
    method: str, path: str, allow: str
) -> None:
    with pytest.raises(ApiError) as refused:
        check_route(method, path, f"/ai{path}")
    assert refused.value.code is ErrorCode.METHOD_NOT_ALLOWED
    assert refused.value.headers == {"allow": allow}
    assert f"/ai{path}" in refused.value.message


def test_other_paths_are_not_found() -> None:
    with pytest.raises(ApiError) as refused:
        check_route("GET", "/v1/files/f/parts", "/v1/files/f/parts")
    assert refused.value.code is ErrorCode.NOT_FOUND
