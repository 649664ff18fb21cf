"""Every route of the admin API: authentication, responses and errors for bad input."""

import gzip
import io
import re
import resource
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from openapi_spec_validator import validate

from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import ArtifactFile
from scheduler.api.admin.endpoint_table import ENDPOINTS
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.accounts.keys import live_keys
from scheduler.store.pool import Pool, using
from tests.builders import an_artifact
from tests.integration.admin.conftest import Admin

ROUTES = [(e.method, re.sub(r"\{(\w+)(:[^}]*)?\}", "nothing", e.path)) for e in ENDPOINTS]


def a_model_body(name: str = "m", **fields: Any) -> dict[str, Any]:
    return {
        "model_id": name,
        "architecture": "LlamaForCausalLM",
        "artifact": msgspec.to_builtins(an_artifact()),
        "context_tokens": 4096,
        "weights_bytes": 1000,
        **fields,
    }


def a_deployment_body(name: str = "d", **policy: Any) -> dict[str, Any]:
    return {
        "deployment_id": name,
        "model_id": "m",
        "name": name,
        "engine": {"driver": "mock"},
        "policy": policy,
    }


async def catalogued(admin: Admin) -> None:
    await admin.pop()
    assert (await admin.ask("PUT", "/v1/models/m", a_model_body())).status == 200


async def test_every_route_requires_the_token_and_none_fails(admin: Admin) -> None:
    for method, path in ROUTES:
        for token in (None, "wrong", ""):
            answer = await admin.ask(method, path, {}, token=token)
            assert answer.status == 401, (method, path)
            assert answer.body["error"]["code"] == "invalid_api_key"
        answer = await admin.ask(method, path, {})
        assert answer.status < 500, (method, path, answer)
        if answer.status >= 400:
            assert re.match(r"cannot |invalid", answer.body["error"]["message"]), answer


async def test_the_openapi_document_is_valid_and_names_every_route(admin: Admin) -> None:
    answer = await admin.ask("GET", "/openapi.json", token=None)
    validate(answer.body)
    assert answer.body["openapi"].startswith("3.1")
    named = {
        (method.upper(), path)
        for path, methods in answer.body["paths"].items()
        for method in methods
    }
    for endpoint in ENDPOINTS:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", endpoint.path)
        assert (endpoint.method, path) in named


async def test_a_replacement_is_the_name_of_another_deployment(admin: Admin) -> None:
    await catalogued(admin)
    new = {**a_deployment_body(), "deployment_id": "new", "name": "tiny-2"}
    assert (await admin.ask("POST", "/v1/deployments", new)).status == 201
    body = a_deployment_body()
    for name in ("nobody", "new", body.get("name", "m")):
        announced = {**body, "deprecation": {"announced_at": 5, "replacement": name}}
        if name == body.get("name", "m"):
            assert (await admin.ask("POST", "/v1/deployments", body)).status == 201
            del announced["deployment_id"]
            refused = await admin.ask("PUT", "/v1/deployments/d", announced)
        else:
            refused = await admin.ask("POST", "/v1/deployments", announced)
        assert refused.status == 404, refused
        assert refused.body["error"]["message"].startswith(f"cannot name {name!r} as the repl")
    announced["deprecation"]["replacement"] = "tiny-2"
    assert (await admin.ask("PUT", "/v1/deployments/d", announced)).status == 200
    # Its end later stands in the way of no other change.
    assert (await admin.ask("DELETE", "/v1/deployments/new")).status == 204
    assert (await admin.ask("PUT", "/v1/deployments/d", announced)).status == 200


async def test_a_deployment_is_created_changed_and_deleted(admin: Admin) -> None:
    await catalogued(admin)
    made = await admin.ask("POST", "/v1/deployments", a_deployment_body(replicas_min=1))
    assert made.status == 201
    assert made.headers["etag"] == '"1"'
    read = await admin.ask("GET", "/v1/deployments/d")
    assert read.body["policy"]["replicas_min"] == 1
    changed = {**a_deployment_body(replicas_min=2), "engine": {"driver": "embedded"}}
    del changed["deployment_id"]
    first = await admin.ask("PUT", "/v1/deployments/d", changed, if_match='"1"')
    assert first.status == 200
    assert first.body["version"] == 2  # another engine is another version
    announced = {**changed, "deprecation": {"announced_at": 5}}
    ending = await admin.ask("PUT", "/v1/deployments/d", announced)
    assert ending.body["deprecation"] == {"announced_at": 5, "sunset_at": 0, "replacement": ""}
    assert ending.body["version"] == 2  # the replicas stay as they are
    moved = await admin.ask("PUT", "/v1/deployments/d", changed, if_match='"1"')
    assert moved.status == 412
    assert moved.body["error"]["code"] == "precondition_failed"
    explained = await admin.ask("GET", "/v1/deployments/d/explain")
    assert explained.status == 200
    assert "there is no node" in explained.body["unmet"][0]
    used = await admin.ask("DELETE", "/v1/models/m")
    assert (used.status, "deployment (d) depends on it" in str(used.body)) == (409, True)
    assert (await admin.ask("DELETE", "/v1/deployments/d")).status == 204
    assert (await admin.ask("GET", "/v1/deployments/d")).status == 404
    again = await admin.ask("POST", "/v1/deployments", a_deployment_body())
    assert (again.status, again.body["version"]) == (201, 3), "a number is never used twice"
    assert (await admin.ask("POST", "/v1/deployments", a_deployment_body())).status == 409
    assert (await admin.ask("DELETE", "/v1/deployments/d")).status == 204
    assert (await admin.ask("DELETE", "/v1/models/m")).status == 204
    events = (await admin.ask("GET", "/v1/events")).body["data"]
    kinds = [event["kind"] for event in events if event["subject"] == "d"]
    assert kinds[2:] == [
        "deployment.delete",
        "deployment.put",
        "deployment.put",
        "deployment.create",
    ]
    put = [event for event in events if event["kind"] == "deployment.put"][-1]
    assert put["before"]["version"] == 1
    assert put["after"]["version"] == 2


async def test_replicas_are_replaced_when_more_or_fewer_of_them_may_sleep(admin: Admin) -> None:
    """They were placed to sleep or to stay awake: without a new version none would change."""
    await catalogued(admin)
    body = a_deployment_body(replicas_min=1)
    assert (await admin.ask("POST", "/v1/deployments", body)).status == 201
    del body["deployment_id"]
    for version, sleep in enumerate(({}, {"overcommit": 4}, {"overcommit": 4, "awake_min": 1}), 1):
        for replicas_max in (5, 6):
            policy = {"replicas_max": replicas_max, **sleep}
            changed = await admin.ask("PUT", "/v1/deployments/d", {**body, "policy": policy})
            assert (changed.status, changed.body["version"]) == (200, version)


WRONG_DEPLOYMENTS: list[tuple[dict[str, Any], str]] = [
    ({"engine": {"driver": "magic"}}, "there is no driver 'magic'"),
    ({"policy": {"replicas_min": 5, "replicas_max": 2}}, "replicas_min 5 is over"),
    ({"policy": {"deny": ["XX"]}}, "deny names 'XX'"),
    ({"policy": {"allow": ["NL"], "deny": ["ams"]}}, "together leave no PoP"),
    ({"policy": {"keep_warm": ["ams"], "allow": ["cdg"]}}, "allow names 'cdg'"),
    ({"policy": {"keep_warm": ["NL"]}}, "keep_warm names 'NL', which is not a PoP"),
    ({"policy": {"keep_warm": ["ams", "ams", "ams", "ams"]}}, "keep_warm names more"),
    ({"model_id": "nobody"}, "no model nobody"),
    ({"deployment_id": "Not A Name"}, "deployment_id"),
    ({"policy": {"replicas_min": -1}}, "replicas_min"),
    ({"engine": {"context_tokens_max": 1.5}}, "context_tokens_max"),
    ({"surprise": 1}, "surprise"),
    ({"policy": "x"}, "policy"),
]


async def test_an_invalid_deployment_is_refused_with_the_reason(admin: Admin) -> None:
    await catalogued(admin)
    for change, words in WRONG_DEPLOYMENTS:
        answer = await admin.ask("POST", "/v1/deployments", {**a_deployment_body(), **change})
        assert answer.status in (400, 404), change
        assert words in answer.body["error"]["message"]


HARMFUL_PATHS = [
    ("../../etc/passwd", "leaves its folder"),
    ("/etc/passwd", "must be relative"),
    ("weights.bin", "a pickle can run code"),
    ("a//b", "leaves its folder"),
]


async def test_a_harmful_artifact_is_refused(admin: Admin) -> None:
    for path, words in HARMFUL_PATHS:
        file = ArtifactFile(path=path, size_bytes=1, sha256="0" * 64)
        artifact = {
            "source": "https://example.com/",
            "files": [msgspec.to_builtins(file)],
            "digest": manifest_digest([file]),
        }
        answer = await admin.ask("PUT", "/v1/models/m", a_model_body(artifact=artifact))
        assert answer.status == 400, path
        assert words in answer.body["error"]["message"]
    wrong = {**msgspec.to_builtins(an_artifact()), "digest": "0" * 64}
    answer = await admin.ask("PUT", "/v1/models/m", a_model_body(artifact=wrong))
    assert "its digest must be" in answer.body["error"]["message"]


async def test_a_repeated_idempotency_key_is_answered_and_not_carried_out(admin: Admin) -> None:
    body = {"tenant_id": "acme"}
    first = await admin.ask("POST", "/v1/keys", body, idempotency_key="one")
    again = await admin.ask("POST", "/v1/keys", body, idempotency_key="one")
    assert first.status == again.status == 201
    assert again.body == first.body
    assert again.headers["idempotent-replay"] == "true"
    assert len((await admin.ask("GET", "/v1/keys")).body["data"]) == 1
    other = await admin.ask("POST", "/v1/keys", {"tenant_id": "b"}, idempotency_key="one")
    assert other.status == 409


async def test_pages_are_exact_while_rows_are_added(admin: Admin) -> None:
    names = [f"{a}{b}m" for a in "abc" for b in "xyz"]
    for name in names:
        await admin.pop(name)
    seen: list[str] = []
    cursor = ""
    while True:
        page = (await admin.ask("GET", f"/v1/pops?limit=2&cursor={cursor}")).body
        seen += [row["pop"] for row in page["data"]]
        await admin.pop(f"aa{'abcdefghij'[len(seen) % 10]}")  # before the cursor: never seen
        if page["next_cursor"] is None:
            break
        cursor = page["next_cursor"]
    assert [name for name in seen if name in names] == sorted(names)
    assert len(set(seen)) == len(seen)
    for query in ("limit=0", "limit=501", "limit=x", "limit=%C2%B2", "cursor=%FF%FF"):
        assert (await admin.ask("GET", f"/v1/pops?{query}")).status == 400
    superscript_two = "wrI="
    assert (await admin.ask("GET", f"/v1/events?cursor={superscript_two}")).status == 400
    put = await admin.ask("DELETE", f"/v1/pops/{names[0]}", if_match='"\u00b2"')
    assert (put.status, put.body["error"]["param"]) == (400, "If-Match")


async def test_a_key_is_shown_once_and_its_secret_is_not_in_the_database(
    admin: Admin, pool: Pool
) -> None:
    key = {"tenant_id": "acme"}
    made = (await admin.ask("POST", "/v1/keys", key, idempotency_key="one")).body
    token = await admin.ask("POST", "/v1/join-tokens", {"pop": "ams"})
    assert token.status == 404
    await admin.pop()
    token = await admin.ask("POST", "/v1/join-tokens", {"pop": "ams"}, idempotency_key="one")
    read = (await admin.ask("GET", f"/v1/keys/{made['key_id']}")).body
    assert read["key"] is None
    texts = [made["key"].split("_")[2], token.body["token"].split("_")[3]]
    secrets = [*texts, *(text.encode().hex() for text in texts)]
    async with using(pool) as connection:
        tables = await connection.fetch(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
        )
        for (table,) in tables:
            rows = await connection.fetch(f"SELECT t::text FROM {table} t")
            assert not any(secret in row[0] for row in rows for secret in secrets), table
    assert (await admin.ask("DELETE", f"/v1/keys/{made['key_id']}")).status == 204
    assert (await admin.ask("GET", f"/v1/keys/{made['key_id']}")).body["revoked"]


async def test_a_changed_key_is_published_without_reading_the_fleet(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(PublishedRoutes, "mark_key_changed", lambda _, key_id: read.append(key_id))
    monkeypatch.setattr(
        PublishedRoutes, "mark_changed", lambda _, node_id=None: read.append("the fleet")
    )
    key_id = (await admin.ask("POST", "/v1/keys", {"tenant_id": "acme"})).body["key_id"]
    await admin.ask("PUT", f"/v1/keys/{key_id}/limits", {"tokens_per_min": 5})
    await admin.ask("PUT", "/v1/tenants/acme/limits", {"tokens_per_day": 5})
    await admin.ask("DELETE", "/v1/tenants/acme")
    await admin.ask("DELETE", f"/v1/keys/{key_id}")
    assert read == [key_id, key_id, "tenant:acme", "tenant:acme", key_id]


async def test_a_keys_limits_are_replaced_and_misspelt_ones_refused(admin: Admin) -> None:
    wrong = {"tenant_id": "acme", "limits": {"request_per_min": 5}}
    assert (await admin.ask("POST", "/v1/keys", wrong)).status == 400
    made = (await admin.ask("POST", "/v1/keys", {"tenant_id": "acme"})).body
    path = f"/v1/keys/{made['key_id']}/limits"
    first = await admin.ask("PUT", path, {"tokens_per_min": 5, "spend_per_day": 1.5})
    assert first.body["limits"]["spend_per_day"] == 1.5
    moved = await admin.ask("PUT", path, {"concurrency": 2}, if_match=f'"{made["etag"]}"')
    assert moved.status == 412
    second = await admin.ask("PUT", path, {"concurrency": 2}, if_match=first.headers["etag"])
    assert second.body["limits"] == {
        "requests_per_min": 0,
        "tokens_per_min": 0,
        "concurrency": 2,
        "tokens_per_day": 0,
        "spend_per_day": 0.0,
        "tokens_per_month": 0,
        "spend_per_month": 0.0,
    }
    for limits in ({"concurrency": -1}, {"spend_per_day": -0.5}, {"tokens_per_min": "many"}):
        assert (await admin.ask("PUT", path, limits)).status == 400
    assert (await admin.ask("PUT", "/v1/keys/nobody/limits", {})).status == 404
    key = f"/v1/keys/{made['key_id']}"
    assert (await admin.ask("DELETE", key, if_match=first.headers["etag"])).status == 412
    events = (await admin.ask("GET", f"/v1/events?subject={made['key_id']}")).body["data"]
    assert [event["kind"] for event in events] == ["key.limit", "key.limit", "key.create"]


async def test_a_router_can_be_deleted_and_then_its_pop(admin: Admin, pool: Pool) -> None:
    await admin.pop()
    async with using(pool) as connection:
        await connection.execute("INSERT INTO router (router_id, pop) VALUES ('r1', 'ams')")
    assert (await admin.ask("DELETE", "/v1/pops/ams")).status == 409
    async with using(pool) as connection:
        await connection.execute("UPDATE router SET last_seen_at = clock_timestamp()")
    live = await admin.ask("DELETE", "/v1/routers/r1")
    assert live.status == 409
    assert "or revoke it first" in live.body["error"]["message"]
    assert (await admin.ask("GET", "/v1/revocations")).body["data"] == []
    async with using(pool) as connection:
        await connection.execute("UPDATE router SET last_seen_at = now() - interval '1 hour'")
    assert (await admin.ask("DELETE", "/v1/routers/r1")).status == 204
    assert (await admin.ask("DELETE", "/v1/routers/r1")).status == 404
    (refused,) = (await admin.ask("GET", "/v1/revocations")).body["data"]
    assert (refused["role"], refused["name"], refused["serial"]) == ("router", "r1", "")
    assert (await admin.ask("DELETE", "/v1/pops/ams")).status == 204


BAD_BODIES = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b'{"city": 7}', 400),
    (b'{"city": "\xff"}', 400),
    (b'{"city":' + b"[" * 100_000, 400),
    (b'{"city":"a\\u0000b","country":"NL","latitude":1.0,"longitude":1.0}', 400),
    (b'{"city":"a","country":"NL","latitude":NaN,"longitude":1.0}', 400),
    (b'{"city":"a","country":"NL","latitude":1e999,"longitude":1.0}', 400),
    (b'{"city":"' + b"a" * 2_000_000 + b'"}', 413),
]


async def test_a_bad_body_gets_a_clear_error(admin: Admin) -> None:
    for raw, status in BAD_BODIES:
        answer = await admin.ask("PUT", "/v1/pops/ams", raw=raw)
        assert answer.status == status, raw[:80]
        assert answer.body["error"]["message"].startswith("cannot ")
    assert (await admin.ask("GET", "/v1/pops")).body["data"] == []


async def test_a_gzip_bomb_and_a_hundred_megabytes_are_refused_without_using_memory(
    admin: Admin,
) -> None:
    bomb = gzip.compress(b" " * 300_000_000, compresslevel=1)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def hundred_megabytes() -> AsyncIterator[bytes]:
        for _ in range(1600):
            yield b"x" * 65_536

    headers = {"authorization": "Bearer 0123456789abcdef-admin"}
    async with aiohttp.ClientSession(headers=headers) as http:
        url = f"{admin.url}/v1/pops/ams"
        packed = {"content-encoding": "gzip"}
        async with http.put(url, data=io.BytesIO(bomb), headers=packed) as response:
            assert response.status == 413
        # A connection closed while the client still sends counts as refused too.
        with suppress(aiohttp.ClientOSError):
            async with http.put(url, data=hundred_megabytes()) as response:
                assert response.status == 413
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024
    assert (await admin.ask("GET", "/v1/status")).status == 200


async def test_a_deployment_keeps_its_kind_of_model(admin: Admin) -> None:
    await catalogued(admin)
    assert (await admin.ask("POST", "/v1/deployments", a_deployment_body())).status == 201
    model = (await admin.ask("GET", "/v1/models/m")).body["model"]
    encoder = {**model, "model_id": "encoder", "kind": "embedding"}
    assert (await admin.ask("PUT", "/v1/models/encoder", encoder)).status == 200
    changed = {**a_deployment_body(), "model_id": "encoder"}
    del changed["deployment_id"]
    for method, path, body in (
        ("PUT", "/v1/deployments/d", changed),
        ("POST", "/v1/deployments/d/rollouts", {"model_id": "encoder"}),
    ):
        refused = await admin.ask(method, path, body)
        assert refused.status == 409
        assert "a model of kind 'embedding'" in refused.body["error"]["message"]
    assert (await admin.ask("GET", "/v1/deployments/d")).body["model_id"] == "m"


@pytest.mark.parametrize(("method", "path"), [("PUT", "/limits"), ("GET", ""), ("DELETE", "")])
async def test_a_pasted_key_is_not_repeated(admin: Admin, method: str, path: str) -> None:
    made = await admin.ask("POST", "/v1/keys", {"tenant_id": "t"})
    body: dict[str, Any] | None = {} if method == "PUT" else None
    refused = await admin.ask(method, f"/v1/keys/{made.body['key']}{path}", body)
    assert refused.status == 404
    assert made.body["key"][17:60] not in str(refused.body)
    assert "not the whole key" in refused.body["error"]["message"]


async def test_only_a_known_name_is_revoked_unless_the_operator_insists(admin: Admin) -> None:
    body = {"role": "router", "name": "typo"}
    refused = await admin.ask("POST", "/v1/revocations", body)
    assert refused.status == 404
    assert (await admin.ask("GET", "/v1/revocations")).body["data"] == []
    insisted = await admin.ask("POST", "/v1/revocations", {**body, "may_be_unknown": True})
    assert insisted.status == 201
    assert (await admin.ask("POST", "/v1/revocations", body)).status == 201


async def test_a_key_is_limited_to_regions_that_exist(admin: Admin, pool: Pool) -> None:
    await admin.pop()
    unknown = await admin.ask("POST", "/v1/keys", {"tenant_id": "acme", "regions": ["Europe"]})
    assert unknown.status == 400
    assert "'Europe' is neither a PoP" in unknown.body["error"]["message"]
    body = {"tenant_id": "acme", "regions": ["NL", "ams"]}
    made = (await admin.ask("POST", "/v1/keys", body)).body
    assert made["regions"] == ["NL", "ams"]
    async with using(pool) as connection:
        (entry,) = await live_keys(connection, [made["key_id"]])
    assert entry.regions == ("NL", "ams")
    (event,) = (await admin.ask("GET", "/v1/events?limit=1")).body["data"]
    assert (event["kind"], event["after"]["regions"]) == ("key.create", ["NL", "ams"])


async def test_a_key_keeps_the_ids_of_deployments_given_by_id_or_name(
    admin: Admin, pool: Pool
) -> None:
    await catalogued(admin)
    named = {**a_deployment_body(), "name": "@cf/acme/chat"}
    assert (await admin.ask("POST", "/v1/deployments", named)).status == 201
    for given in ("d", "@cf/acme/chat"):
        body = {"tenant_id": "acme", "deployments": [given]}
        made = (await admin.ask("POST", "/v1/keys", body)).body
        assert made["deployments"] == ["d"]
        async with using(pool) as connection:
            (entry,) = await live_keys(connection, [made["key_id"]])
        assert entry.deployments == ("d",)


async def test_a_misspelt_field_is_refused_at_any_depth(admin: Admin) -> None:
    document = (await admin.ask("GET", "/openapi.json", token=None)).body
    schemas = document["components"]["schemas"]
    deployment, model = a_deployment_body(), a_model_body()
    artifact = msgspec.to_builtins(an_artifact(), str_keys=True)
    artifact["files"] = [{**artifact["files"][0], "sha": "0"}]
    cases: tuple[tuple[str, str, dict[str, Any], str], ...] = (
        ("POST /v1/deployments", "NewDeploymentBody", {**deployment, "rolls": "auto"}, "rolls"),
        (
            "POST /v1/deployments",
            "NewDeploymentBody",
            {**deployment, "policy": {"role": "auto", "replicas_max": 2.0}},
            "policy.role",
        ),
        (
            "POST /v1/deployments",
            "NewDeploymentBody",
            {**deployment, "engine": {"share-kv": True}},
            "engine.share-kv",
        ),
        ("PUT /v1/models/m", "CatalogModel", {**model, "licens": "MIT"}, "licens"),
        (
            "PUT /v1/models/m",
            "CatalogModel",
            {**model, "artifact": artifact},
            "artifact.files.0.sha",
        ),
    )
    for endpoint, name, body, field in cases:
        method, _, path = endpoint.partition(" ")
        answer = await admin.ask(method, path, body)
        assert answer.status == 400, answer
        assert field in answer.body["error"]["message"]
        schema = {**schemas[name], "components": document["components"]}
        assert not Draft202012Validator(schema).is_valid(body), field


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/usage?tenant=acme", "tenant"),
        ("/v1/events?limit=1&subjects=d", "subjects"),
        ("/v1/nodes/n?cursor=", "cursor"),
        ("/v1/keys?x%22=", 'x"'),
    ],
)
async def test_an_unknown_query_parameter_is_refused(admin: Admin, path: str, name: str) -> None:
    refused = await admin.ask("GET", path)
    assert refused.status == 400
    assert refused.body["error"]["param"] == name
    assert "cannot use the query parameter" in refused.body["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "name", "values"),
    [
        ("GET", "/v1/usage", "by", ("key", "tenant", "day", "")),
        ("GET", "/v1/usage", "per", ("total", "day", "key")),
        ("GET", "/v1/usage", "from", ("2026-13-01", "1999-01-01", "soon")),
        ("GET", "/v1/keys", "limit", ("1", "500", "0", "501", "x")),
        ("GET", "/v1/keys", "cursor", ("", "YWJj", "a b", "%")),
        ("DELETE", "/v1/pops/{pop}", "If-Match", ('"1"', 'W/"7"', "*", "one", '"\u00b2"')),
        ("POST", "/v1/keys", "Idempotency-Key", ("a", "~" * 128, "a" * 129, "a b")),
    ],
)
async def test_the_document_accepts_no_parameter_that_is_refused(
    admin: Admin, method: str, path: str, name: str, values: tuple[str, ...]
) -> None:
    document = (await admin.ask("GET", "/openapi.json", token=None)).body
    (parameter,) = (
        given
        for given in document["paths"][path][method.lower()]["parameters"]
        if given["name"] == name
    )
    checker = Draft202012Validator(
        parameter["schema"], format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    sent = {"tenant_id": "t"} if method == "POST" else None
    accepted = []
    for value in values:
        target = path.replace("{pop}", "xyz")
        fields: dict[str, Any] = {}
        if parameter["in"] == "query":
            target += f"?{name}={quote(value)}"
        else:
            fields[name.replace("-", "_")] = value
        answer = await admin.ask(method, target, sent, **fields)
        is_refused = answer.status == 400 or "not an ETag" in str(answer.body)
        typed = int(value) if name == "limit" and value.isdigit() else value
        if checker.is_valid(typed):
            accepted.append(value)
            assert not is_refused, (value, answer)
    assert len(accepted) < len(values)


@pytest.mark.parametrize("name", ["from", "to", "by", "per"])
async def test_an_empty_parameter_is_not_the_same_as_none(admin: Admin, name: str) -> None:
    refused = await admin.ask("GET", f"/v1/usage?{name}=")
    assert (refused.status, refused.body["error"]["param"]) == (400, name)


async def test_an_empty_idempotency_key_is_refused(admin: Admin) -> None:
    """It would protect from nothing: a script's variable is not set."""
    made = await admin.ask("POST", "/v1/keys", {"tenant_id": "t"}, Idempotency_Key="")
    assert made.status == 400, made


async def test_a_whole_number_may_be_written_as_a_float(admin: Admin) -> None:
    made = await admin.ask(
        "POST", "/v1/keys", raw=b'{"tenant_id":"t","limits":{"concurrency":3.0}}'
    )
    assert (made.status, made.body["limits"]["concurrency"]) == (201, 3)
    refused = await admin.ask(
        "POST", "/v1/keys", raw=b'{"tenant_id":"t","limits":{"concurrency":1.5}}'
    )
    assert refused.status == 400
    assert "`int`" in refused.body["error"]["message"]
    deep = await admin.ask("POST", "/v1/keys", raw=b'{"limits":1.0,"note":' + b"[" * 100_000)
    assert deep.status == 400
