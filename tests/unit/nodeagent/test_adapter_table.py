"""Which adapters an engine is to forget."""

from nodeagent.decide.adapter_table import REFUSALS_MAX, AdapterTable


def loaded(*names: str, loaded_max: int = 2) -> AdapterTable:
    table = AdapterTable(loaded_max)
    for name in names:
        table.add(name, f"digest of {name}")
        table.begin_use(name)
        table.end_use(name)
    return table


def test_the_least_recently_used_is_forgotten() -> None:
    table = loaded("a", "b", "c")
    table.begin_use("a")
    assert table.take_surplus() == ["b"]
    assert list(table.names) == ["c", "a"]
    assert set(table.digests) == {"digest of a", "digest of c"}


def test_one_in_use_is_kept_beyond_the_limit() -> None:
    table = loaded("a", "b", "c")
    for name in ("a", "b", "c"):
        table.begin_use(name)
    assert table.take_surplus() == []
    table.end_use("b")
    assert table.take_surplus() == ["b"]


def test_a_new_engine_has_none() -> None:
    table = loaded("a")
    table.begin_use("a")
    table.clear()
    table.end_use("a")
    assert "a" not in table
    assert not table.names


def test_a_refused_one_is_remembered_until_the_engine_is_replaced() -> None:
    table = AdapterTable(2)
    table.refuse("digest of a", "its rank is too high")
    assert table.refusal("digest of a") == "its rank is too high"
    assert table.refusal("digest of b") == ""
    for number in range(REFUSALS_MAX):
        table.refuse(f"digest {number}", "no")
    assert table.refusal("digest of a") == ""
    table.clear()
    assert table.refusal("digest 1") == ""
