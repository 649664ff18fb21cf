"""Query parameters of public routes: one that a route lacks is refused by name."""

import pytest

from isochrone.wire.errors import ApiError
from router.apis.document.query_check import check_query
from router.apis.document.routes import ROUTES


@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("POST", "/ai/run/@cf/meta/llama", "queueRequest=true&rejectIfBusy=false"),
        ("POST", "/client/v4/accounts/a/ai/run/m", "rejectIfBusy=true"),
        ("POST", "/v1/messages", "beta=true"),
        ("POST", "/v1/messages/count_tokens", "beta=true"),
        ("GET", "/v1/models", "client_version=0.1&limit=3"),
        ("GET", "/v1/responses/r", "stream=true&include[]=x&starting_after=1"),
        ("GET", "/ai/models/search", "search=x&per_page=2"),
        ("GET", "/ai/finetunes/public", "limit=1&order_by=name"),
        ("GET", "/healthz", "probe=1"),
        ("GET", "/v1/nothing", "x=1"),
        ("PUT", "/v1/batches", "x=1"),
    ],
)
def test_parameters_that_a_route_has_are_accepted(method: str, path: str, query: str) -> None:
    check_query(method, path, query)


@pytest.mark.parametrize(
    ("method", "path", "query", "name"),
    [
        ("POST", "/ai/run/@cf/meta/llama", "rejectIfBusy=true&temperature=0", "temperature"),
        ("POST", "/v1/chat/completions", "api-version=1", "api-version"),
        ("POST", "/v1/messages", "beta=true&x", "x"),
        ("DELETE", "/v1/responses/r", "stream=true", "stream"),
        ("GET", "/client/v4/accounts/a/ai/finetunes", "public=", "public"),
        ("GET", "/v1/files", "limit=1&Limit=1", "Limit"),
    ],
)
def test_other_parameters_are_refused_by_name(
    method: str, path: str, query: str, name: str
) -> None:
    with pytest.raises(ApiError) as refused:
        check_query(method, path, query)
    assert (refused.value.param, refused.value.meaning.status) == (name, 400)


def test_every_route_refuses_what_it_does_not_have() -> None:
    for route in ROUTES:
        if route.surface == "open" or route.path.startswith("/v1/models"):
            continue
        path = route.path.replace("{", "").replace("}", "")
        with pytest.raises(ApiError, match="'colour'"):
            check_query(route.method, path, "colour=red")
