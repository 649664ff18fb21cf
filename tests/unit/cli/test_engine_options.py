"""`--option` of `deploy`: values, flags and removal."""

import pytest

from isochrone.cli.engine import engine_of

NOTHING = dict.fromkeys(
    (
        *("driver", "context_tokens_max", "kv_memory_bytes", "tokens_in_flight_max"),
        *("devices", "nodes", "share_kv"),
    )
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("enforce_eager=",), {"dtype": "half", "enforce_eager": "true"}),
        (("enforce_eager=false",), {"dtype": "half", "enforce_eager": "false"}),
        (("dtype=", "seed=7"), {"seed": "7"}),
    ],
)
def test_an_empty_value_sets_a_flag_and_removes_any_other_option(
    options: tuple[str, ...], expected: dict[str, str]
) -> None:
    before = {"driver": "vllm", "options": {"dtype": "half"}}
    assert engine_of(before, {**NOTHING, "options": options})["options"] == expected


def test_sharing_kv_is_kept_until_it_is_changed() -> None:
    given = {**NOTHING, "options": ()}
    assert "share_kv" not in engine_of({}, given)
    assert engine_of({"share_kv": True}, given)["share_kv"] is True
    assert engine_of({"share_kv": True}, {**given, "share_kv": False})["share_kv"] is False
