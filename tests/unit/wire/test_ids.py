"""What may be a name, and what may not."""

import msgspec
import pytest

from isochrone.wire.admin import NewDeploymentBody
from isochrone.wire.ids import is_name, is_pop, is_request_id


def test_names_are_of_their_letters_and_of_no_line_more() -> None:
    assert is_name("ams-gpu.7") and is_pop("ams") and is_request_id("A-1.b_c")
    for wrong in ("", "-a", "a-", "A", "a b", "a" * 64):
        assert not is_name(wrong)
    # A name goes into headers as it is: a line's end would begin another.
    assert not (is_name("n1\n") or is_pop("ams\n") or is_request_id("a\n"))


@pytest.mark.parametrize("field", ["deployment_id", "model_id", "name"])
def test_no_name_that_an_operator_writes_ends_in_a_line(field: str) -> None:
    body = {"deployment_id": "d", "model_id": "m", "name": "n"}
    assert msgspec.convert(body, NewDeploymentBody)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**body, field: "d\n"}, NewDeploymentBody)


@pytest.mark.parametrize("name", ["@cf/meta/llama-3.1-8b", "llama3:8b", "org/model:Q4_K_M"])
def test_clients_names_of_models_may_have_slashes_colons_and_an_at_sign(name: str) -> None:
    body = {"deployment_id": "d", "model_id": name, "name": name}
    assert msgspec.convert(body, NewDeploymentBody).name == name
