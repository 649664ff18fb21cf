"""Authentication of keys, and which route tables are accepted."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.client_keys.keys import format_key, parse_key
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    KeyId,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
    TenantId,
)
from isochrone.wire.peers.routes import DeploymentEntry, KeyEntry, KeyTable, Route, RouteTable
from router.apis.openai.decode import CHAT, decode, wants_usage, with_usage_requested
from router.decide.admission.authentication import AuthenticationCache, authenticate, may_use
from router.decide.routes.table_acceptance import (
    EMPTY_TABLE_HELD_S,
    SILENCE_COUNTS_AFTER_S,
    check_table,
    merge_additions,
    trusts_silence,
)

TEXT = format_key(KeyId("k" * 12), b"\x01" * 32)


def a_key(**fields: object) -> KeyEntry:
    parsed = parse_key(TEXT)
    assert parsed is not None
    values = {"tenant_id": TenantId("t"), **fields}
    return KeyEntry(key_id=parsed[0], secret_sha256=parsed[1], **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "key", "words"),
    [
        (None, a_key(), "didn't provide an API key"),
        ("Basic x", a_key(), "didn't provide an API key"),
        ("Bearer iso_x", a_key(), "form"),
        (f"Bearer {TEXT}{'x' * 500}", a_key(), "form"),
        (
            f"Bearer {format_key(KeyId('o' * 12), bytes(32))}",
            a_key(),
            "Incorrect API key provided: it is unknown, revoked or expired",
        ),
        (
            f"Bearer {format_key(KeyId('k' * 12), bytes(32))}",
            a_key(),
            "Incorrect API key provided: it is unknown, revoked or expired",
        ),
        (f"Bearer {TEXT}", a_key(expires_at=50.0), "expired"),
        (f"Bearer {TEXT[:30]}\udcff{TEXT[31:]}", a_key(), "form"),
        (f"Bearer {TEXT[:-1]}", a_key(), "form"),
        (f"Bearer {TEXT[:-1]}{'x' if TEXT[-1] != 'x' else 'y'}", a_key(), "form"),
        (f"Bearer osi_{TEXT[4:]}", a_key(), "form"),
        (f"Bearer {TEXT[:17]}{'z' * 43}{TEXT[60:]}", a_key(), "form"),
    ],
)
def test_the_error_says_what_is_wrong_with_a_key(
    header: str | None, key: KeyEntry, words: str
) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        authenticate(KeyTable.of([key]), header, 100.0)
    assert caught.value.code is ErrorCode.INVALID_KEY
    assert TEXT[17:50] not in caught.value.message


@settings(deadline=None, max_examples=100)
@given(st.text() | st.text(min_size=67, max_size=67).map(lambda text: f"Bearer {text}"))
def test_any_other_text_in_place_of_a_key_is_refused(header: str) -> None:
    with pytest.raises(ApiError) as caught:
        authenticate(KeyTable.of([a_key()]), header, 100.0)
    assert caught.value.code is ErrorCode.INVALID_KEY


def test_a_valid_key_may_use_its_deployments() -> None:
    key = a_key(expires_at=200.0, deployments=("a",))
    assert authenticate(KeyTable.of([key]), f"bearer  {TEXT} ", 100.0) is key
    its, other = (
        DeploymentEntry(
            deployment_id=DeploymentId(deployment_id),
            name=name,
            model_id=ModelId("m"),
            context_tokens=4096,
        )
        for deployment_id, name in (("a", "@cf/acme/chat"), ("b", "a"))
    )
    assert (may_use(key, its), may_use(key, other), may_use(a_key(), other)) == (True, False, True)


def test_a_cached_key_is_accepted_only_as_long_as_the_table_has_it() -> None:
    cache, header = AuthenticationCache(), f"Bearer {TEXT}".encode()
    key = a_key(expires_at=200.0)
    keys = KeyTable.of([key])
    assert cache.authenticate(keys, header, 100.0) is key
    assert cache.authenticate(keys, header, 199.0) is key
    with pytest.raises(ApiError, match="expired"):
        cache.authenticate(keys, header, 200.0)
    renewed = KeyTable.of([a_key()])
    assert cache.authenticate(renewed, header, 300.0) is renewed.get(key.key_id)
    with pytest.raises(
        ApiError, match="Incorrect API key provided: it is unknown, revoked or expired"
    ):
        cache.authenticate(KeyTable(), header, 300.0)
    with pytest.raises(ApiError, match="form"):
        cache.authenticate(renewed, header[:-1], 300.0)


def a_table(
    replicas: str,
    generation: int = 1,
    epoch: int = 1,
    keys: int = 1,
    deployments: int = 1,
    revoked: str = "",
    expires_at: float = 0.0,
) -> RouteTable:
    return RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(generation),
        epoch=Epoch(epoch),
        deployments=tuple(
            DeploymentEntry(
                deployment_id=DeploymentId(f"d{n}"),
                name=f"m{n}",
                model_id=ModelId("m"),
                context_tokens=4096,
            )
            for n in range(deployments)
        ),
        routes=tuple(
            Route(
                replica_id=ReplicaId(name),
                deployment_id=DeploymentId("d0"),
                version=1,
                node_id=NodeId(f"n-{name}"),
                pop=PopId("ams"),
                address="x:1",
            )
            for name in replicas
        ),
        keys=KeyTable.of(
            KeyEntry(
                key_id=KeyId(f"k{n}"),
                secret_sha256="",
                tenant_id=TenantId("t"),
                expires_at=expires_at,
            )
            for n in range(keys)
        ),
        keys_revoked=tuple(KeyId(f"k{n}") for n in revoked),
    )


@pytest.mark.parametrize(
    ("old", "new", "answering", "accepted"),
    [
        (a_table("abcd"), a_table("abc", 2), "abcd", True),
        (a_table("abcd"), a_table("ab", 2), "abcd", True),
        (a_table("abcd"), a_table("a", 2), "abcd", False),
        (a_table("abcd"), a_table("a", 2), "ab", False),
        (a_table("abcd"), a_table("a", 2), "a", True),
        (a_table("abcd"), a_table("", 2), "", True),
        (a_table("a"), a_table("", 2), "a", False),
        (a_table("a"), a_table("", 2), "", True),
        (a_table("a"), a_table("b", 2), "a", True),
        (a_table("ab"), a_table("cd", 2), "ab", True),
        (a_table("abcd"), a_table("ae", 2), "abcd", False),
        (a_table("ab"), a_table("ab", 2, deployments=0), "ab", False),
        (a_table("ab"), a_table("", 2, deployments=0), "", True),
        (a_table("ab", keys=3), a_table("ab", 2, keys=0), "", False),
        (a_table("ab", keys=1), a_table("ab", 2, keys=0), "ab", True),
        (a_table("ab", keys=3), a_table("ab", 2, keys=0, revoked="012"), "", True),
        (a_table("ab", keys=3), a_table("ab", 2, keys=0, revoked="2"), "", False),
        (a_table("ab", keys=3, expires_at=9.0), a_table("ab", 2, keys=0), "", True),
        (a_table("ab", 5), a_table("ab", 4), "", False),
        (a_table("ab", 5, 3), a_table("ab", 6, 2), "", False),
        (a_table("ab", 5, 3), a_table("ab", 4, 4), "", False),
        (None, a_table(""), "", True),
    ],
)
def test_which_tables_are_accepted(
    old: RouteTable | None, new: RouteTable, answering: str, accepted: bool
) -> None:
    verdict = check_table(old, new, lambda route: route.replica_id in answering)
    assert (verdict is None) is accepted, verdict
    if verdict is not None:
        assert verdict.reason.startswith("cannot follow")


@pytest.mark.parametrize(
    ("routes", "up_for_s", "refused_for_s", "trusted"),
    [
        ("a", 3600.0, 0.0, True),
        ("", 3600.0, 0.0, False),
        ("", 3600.0, EMPTY_TABLE_HELD_S - 1, False),
        ("", 3600.0, EMPTY_TABLE_HELD_S, True),
        ("a", SILENCE_COUNTS_AFTER_S - 1, 0.0, False),
        ("a", SILENCE_COUNTS_AFTER_S, 0.0, True),
    ],
)
def test_silent_replicas_are_kept_against_an_empty_table_and_until_nodes_were_probed(
    routes: str, up_for_s: float, refused_for_s: float, trusted: bool
) -> None:
    assert trusts_silence(a_table(routes, 2), up_for_s, refused_for_s) is trusted


NAMES = st.sets(st.sampled_from("abcdefgh")).map(lambda names: "".join(sorted(names)))


@settings(deadline=None, max_examples=150)
@given(NAMES, NAMES, NAMES)
def test_most_answering_replicas_are_never_dropped_at_once(
    old: str, new: str, answering: str
) -> None:
    alive = set(answering) & set(old)
    verdict = check_table(a_table(old), a_table(new, 2), lambda route: route.replica_id in alive)
    lost = set(old) - set(new)
    if verdict is None and alive & lost and len(lost) >= 2:
        # Either few were dropped, or as many new ones were added.
        assert len(lost) <= len(old) / 2 or len(set(new) - set(old)) >= len(lost)


def test_only_dropped_replicas_are_asked_about() -> None:
    asked: list[str] = []

    def is_answering(route: Route) -> bool:
        asked.append(route.replica_id)
        return False

    old = a_table("abcdefgh")
    assert check_table(old, a_table("abcdefg", 2), is_answering) is None
    assert asked == []
    assert check_table(old, a_table("", 2), is_answering) is None
    assert asked == list("abcdefgh")


def test_a_quarantined_table_still_adds() -> None:
    old, new = a_table("abc", keys=2), a_table("ad", 2, keys=3, deployments=2)
    both = merge_additions(old, new)
    assert [route.replica_id for route in both.routes] == ["a", "b", "c", "d"]
    assert (len(both.keys), len(both.deployments), both.generation) == (3, 2, 1)


def test_a_quarantined_table_still_revokes_keys() -> None:
    old = a_table("abc", keys=4)
    new = a_table("a", 2, keys=1, revoked="13")
    assert check_table(old, new, lambda route: route.replica_id == "b") is not None
    served = merge_additions(old, new)
    # k2 is missing without a tombstone, so it is kept.
    assert [key.key_id for key in served.keys] == ["k0", "k2"]
    assert [route.replica_id for route in served.routes] == ["a", "b", "c"]


@settings(deadline=None, max_examples=60)
@given(NAMES, NAMES, st.sets(st.sampled_from("0123")), st.integers(0, 4), st.integers(0, 4))
def test_no_refusal_delays_a_revocation(
    old: str, new: str, revoked: set[str], before: int, after: int
) -> None:
    merged = merge_additions(
        a_table(old, keys=before), a_table(new, 2, keys=after, revoked="".join(sorted(revoked)))
    )
    keys = {key.key_id for key in merged.keys}
    assert {f"k{n}" for n in range(before)} - keys <= {f"k{n}" for n in revoked}
    assert not {f"k{n}" for n in revoked if int(n) >= after} & keys


BODY = '{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true%s}'


@pytest.mark.parametrize(
    ("options", "wants"),
    [
        ("", False),
        (',"stream_options":null', False),
        (',"stream_options":{}', False),
        (',"stream_options":{"include_usage":false,"x":1}', False),
        (',"stream_options":{"include_usage":true}', True),
    ],
)
def test_usage_is_requested_and_nothing_else_changes(options: str, wants: bool) -> None:
    body = (BODY % options).encode()
    request = decode(body, CHAT)
    assert wants_usage(request) is wants
    sent = with_usage_requested(body, request)
    assert wants_usage(decode(sent, CHAT))
    assert (sent == body) is wants
    assert b'"messages":[{"role":"user","content":"x"}]' in sent
    if "x" in options:
        assert b'"x":1' in sent


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_body_is_decoded_or_refused(body: bytes) -> None:
    with suppress(ApiError):
        assert decode(body, CHAT).messages
