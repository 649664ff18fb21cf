"""The admin token: a wrong one is an error of its sender, whatever its bytes are."""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.api.admin.access import check_token

TOKEN = "0123456789abcdef"
TOKEN_SHA256 = hashlib.sha256(TOKEN.encode()).hexdigest()


def a_request(authorization: str) -> Any:
    return SimpleNamespace(headers={"authorization": authorization})


@pytest.mark.parametrize("token", ["wrong", "", "\udcff", f"{TOKEN}\udcff", "é"])
def test_a_wrong_token_gets_401(token: str) -> None:
    """aiohttp decodes bytes that are not UTF-8 as lone surrogates."""
    with pytest.raises(ApiError, match="cannot authenticate") as refused:
        check_token(a_request(f"Bearer {token}"), TOKEN_SHA256)
    assert refused.value.code is ErrorCode.INVALID_KEY


def test_the_token_is_accepted() -> None:
    check_token(a_request(f"bearer  {TOKEN} "), TOKEN_SHA256)
