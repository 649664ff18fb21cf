"""No route of the public API lets a tenant read, change or recognise another tenant's objects.

The routes, their parameters and the fields of their bodies come from the served document. Whatever
may name an object is tried with the id of each object of the other tenant, and with an id that does
not exist: the answers must be the same. A route, parameter or field that this module does not know
fails the test until someone decides what it may name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import pytest

from isochrone.wire.http import headers
from isochrone.wire.ids import Generation, ModelId, TenantId
from isochrone.wire.models.model import Artifact, ArtifactFile
from isochrone.wire.peers import relay as wire
from isochrone.wire.peers.adapter import CONFIG_FILE, AdapterEntry
from tests.integration.admin.conftest import Admin, admin
from tests.integration.router.fleet_of import KEY, a_route, a_table
from tests.integration.router.test_batches import OTHER_KEY, WAIT_S, BatchBench, a_line, bench
from tests.lora_files import config_file
from tests.system.harness import until

__all__ = ["admin", "bench"]

SECRET: Final = "only-for-acme"
OBJECT: Final = "OBJECT"
"""Stands for the id of an object in a path, query or body."""

ADAPTER_MODEL: Final = f"tiny:{OBJECT}"
CHAT: Final = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
MESSAGE: Final = {"type": "message", "role": "user", "content": "hi"}
BATCH: Final = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
CONFIG: Final = config_file().decode()

PATH_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("file_id", "batch_id", "response_id", "conversation_id"), OBJECT),
    **dict.fromkeys(("item_id", "finetune"), OBJECT),
    "model": ADAPTER_MODEL,
}
"""What is tried for each parameter of a path."""

QUERY_NAMES: Final[Mapping[str, str]] = {"after": OBJECT, "model": ADAPTER_MODEL}
"""What is tried for the parameters of a query that may name an object."""

NAMELESS_QUERIES: Final = frozenset(
    {"limit", "order", "purpose", "stream", "starting_after", "orderBy", "queueRequest"}
    | {"rejectIfBusy", "page", "per_page", "author", "hide_experimental", "source", "task"}
    | {"format", "offset", "include_deprecated", "search"}
)

BODIES: Final[Mapping[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/classify": {"input": "hi"},
    "/v1/moderations": {"input": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/audio/transcriptions": {"file": "RIFF"},
    "/v1/audio/translations": {"file": "RIFF"},
    "/v1/audio/speech": {"input": "hi", "voice": "a"},
    "/v1/images/generations": {"prompt": "hi"},
    "/v1/files": {"purpose": "batch", "file": "{}"},
    "/v1/batches": {"input_file_id": "file-none", **BATCH},
    "/v1/conversations": {"items": [MESSAGE]},
    "/v1/conversations/{conversation_id}": {"metadata": {"a": "b"}},
    "/v1/conversations/{conversation_id}/items": {"items": [MESSAGE]},
    "/ai/run/{model}": {"prompt": "hi"},
    "/ai/tomarkdown": {"files": "hi"},
    "/ai/finetunes": {"name": "yours"},
    "/ai/finetunes/{finetune}/finetune-assets": {"file_name": CONFIG_FILE, "file": CONFIG},
}
"""A body that each route takes, but for its model."""

FIELDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "model": (ADAPTER_MODEL,),
    "lora": (OBJECT,),
    "input_file_id": (OBJECT,),
    "previous_response_id": (OBJECT,),
    "conversation": (OBJECT, {"id": OBJECT}),
    "input": ([{"type": "item_reference", "id": OBJECT}],),
    **dict.fromkeys(("container", "thread", "request_id"), (OBJECT,)),
    **dict.fromkeys(("user_profile_id", "workspace_id"), (OBJECT,)),
}
"""What is tried for the fields that may name an object."""

NAMELESS_FIELDS: Final = frozenset(
    {"file", "files", "file_name", "response_format", "stop_token_ids"}
)
MAY_NAME: Final = re.compile(
    r"(?:^|_)(?:ids?|files?|lora|adapter|conversation|response|batch|model|container|thread)(?:_|$)"
)
"""The names of fields that may be those of objects: each is in FIELDS or NAMELESS_FIELDS."""


class Attempt(NamedTuple):
    """A request in which OBJECT stands for an id."""

    method: str
    path: str
    query: str
    body: Any
    is_form: bool

    def naming(self, object_id: str) -> "Attempt":
        """Return the request with an id."""
        body = json.loads(json.dumps(self.body).replace(OBJECT, object_id))
        path, query = (text.replace(OBJECT, object_id) for text in (self.path, self.query))
        return self._replace(path=path, query=query, body=body)


class Answered(NamedTuple):
    """A status and a body."""

    status: int
    text: str


class Objects(NamedTuple):
    """The ids of a tenant's objects, by the parameter of a path that each is for."""

    ids: Mapping[str, list[str]]

    def all(self) -> list[str]:
        return [object_id for ids in self.ids.values() for object_id in ids]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of the scheduler."""
    return {"batch_folder": tmp_path / "batches"}


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the method, the path and the description of each route."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if method != "servers":
                yield method.upper(), path, operation


def field_names(document: Any, operation: Any) -> set[str]:
    """Return the names of the fields of a route's body."""
    names: set[str] = set()
    waiting = [content["schema"] for content in content_of(operation).values()]
    while waiting:
        schema = waiting.pop()
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        names |= schema.get("properties", {}).keys()
        waiting += schema.get("anyOf", [])
    return names


def content_of(operation: Any) -> Any:
    return operation.get("requestBody", {}).get("content", {})


def attempts(document: Any, own: Objects, theirs: Objects) -> Iterator[Attempt]:
    """Yield the requests of one tenant (`own`) that name an object which may be another's."""
    for method, path, operation in operations(document):
        body = None
        if content_of(operation):
            body = {"model": "tiny", **BODIES[path]}
            if "model" not in field_names(document, operation):
                del body["model"]
        base = Attempt(method, path, "", body, "multipart/form-data" in content_of(operation))
        names = re.findall(r"\{(\w+)\}", path)
        for name in names:
            yield from filled(base, {name: PATH_NAMES[name]}, names, (own, theirs))
        of_own = list(filled(base, {}, names, (own,)))
        for query in queries(operation):
            yield from (request._replace(query=query) for request in of_own)
        for field, values in fields(document, operation):
            for value in values:
                changed = {**(body or {}), field: value}
                if field == "request_id":
                    changed = {field: value}
                query = "queueRequest=true" if field == "request_id" else ""
                yield from (request._replace(body=changed, query=query) for request in of_own)


def filled(
    base: Attempt, given: Mapping[str, str], names: list[str], owners: tuple[Objects, ...]
) -> Iterator[Attempt]:
    """Yield a request with all parameters of its path, those not `given` of each owner."""
    others = [name for name in names if name not in given]
    for owner in owners if others else owners[:1]:
        path = base.path
        for name in names:
            value = given.get(name) or ("tiny" if name == "model" else owner.ids[name][0])
            path = path.replace(f"{{{name}}}", value)
        yield base._replace(path=path)


def queries(operation: Any) -> Iterator[str]:
    """Yield the queries of a route that name an object."""
    for parameter in operation["parameters"]:
        name = parameter["name"]
        if parameter["in"] == "query" and name in QUERY_NAMES:
            yield f"{name}={QUERY_NAMES[name]}"
        assert parameter["in"] != "query" or name in {*QUERY_NAMES, *NAMELESS_QUERIES}, (
            f"decide whether the query parameter {name!r} of {operation['operationId']} may name an"
            " object"
        )


def fields(document: Any, operation: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the fields of a route's body that may name an object, with the values to try."""
    for name in sorted(field_names(document, operation)):
        if name in FIELDS:
            yield name, FIELDS[name]
        assert name in FIELDS or name in NAMELESS_FIELDS or not MAY_NAME.search(name), (
            f"decide whether the field {name!r} of {operation['operationId']} may name an object"
        )


async def send(http: aiohttp.ClientSession, key: str, request: Attempt) -> Answered:
    """Send a request that also claims the other tenant's id in the headers of the fleet."""
    claimed = dict.fromkeys((wire.TENANT, headers.CACHE_SALT), "acme")
    data: Any = None
    if request.is_form:
        data = aiohttp.FormData()
        for name, value in request.body.items():
            is_file = name in ("file", "files")
            data.add_field(name, value, filename="a.html" if is_file else None)
    async with http.request(
        request.method,
        f"{request.path}?{request.query}" if request.query else request.path,
        headers={"authorization": f"Bearer {key}", **claimed},
        json=None if request.is_form or request.method == "GET" else request.body,
        data=data,
    ) as answer:
        return Answered(answer.status, await answer.text())


def without(answered: Answered, *object_ids: str) -> Answered:
    """Return an answer without the ids that were named, and without its request's own id."""
    text = re.sub(r'"request_id": ?"[^"]*"', "", answered.text)
    for object_id in object_ids:
        text = text.replace(object_id, OBJECT)
    return answered._replace(text=text)


async def objects_of(
    bench: BatchBench, http: aiohttp.ClientSession, key: str, adapter: list[str]
) -> Objects:
    """Store one object of each kind; return their ids, and those of an `adapter`."""
    client = bench.client if key == KEY else bench.other
    text = SECRET if key == KEY else "other"
    line = {**a_line("one"), "custom_id": text}
    file = await client.files.create(
        file=(f"{text}.jsonl", json.dumps(line).encode()), purpose="batch"
    )
    batch = await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"about": text},
    )
    create: Any = client.responses.create
    stored = await create(model="tiny", input=text, store=True)
    background = await create(model="tiny", input=text, background=True)
    conversation = await client.conversations.create(
        metadata={"about": text}, items=[{"type": "message", "role": "user", "content": text}]
    )
    items = await client.conversations.items.list(conversation.id)
    run = {"requests": [{"prompt": "hi", "max_tokens": 2, "external_reference": text}]}
    queued = Attempt("POST", "/ai/run/tiny", "queueRequest=true", run, is_form=False)
    queued_id = json.loads((await send(http, key, queued)).text)["result"]["request_id"]

    async def have_ended() -> Any:
        one, other = [await client.batches.retrieve(name) for name in (batch.id, queued_id)]
        response = await client.responses.retrieve(background.id)
        states = (one.status, other.status, response.status)
        return one if set(states) == {"completed"} else None

    ended = await until("the batches and the response end", have_ended, WAIT_S)
    return Objects(
        {
            "file_id": [file.id, ended.output_file_id],
            "batch_id": [batch.id, queued_id],
            "response_id": [stored.id, background.id],
            "conversation_id": [conversation.id],
            "item_id": [item.id or "" for item in items.data],
            "finetune": adapter,
        }
    )


async def add_adapters(bench: BatchBench, admin: Admin) -> list[list[str]]:
    """Describe an adapter of each tenant; return the id and the name of each.

    The scheduler then publishes a table, which replaces that of the bench.
    """
    added = []
    for tenant_id, text in (("acme", SECRET), ("other", "other")):
        assert (await admin.ask("POST", "/v1/keys", {"tenant_id": tenant_id})).status == 201
        new = {"tenant_id": tenant_id, "model": "tiny", "name": f"{text}-adapter"}
        made = await admin.ask("POST", "/v1/adapters", {**new, "description": text})
        assert made.status == 201, made
        added.append([made.body["adapter_id"], new["name"]])
    fleet = bench.app.fleet

    async def are_known() -> bool:
        table = fleet.directory.table
        return table is not None and len(table.adapters) == len(added)

    await until("the router knows the adapters", are_known, WAIT_S)
    adopt_adapter(bench, *added[0])
    return added


def adopt_adapter(bench: BatchBench, adapter_id: str, name: str) -> None:
    """Let the router serve the bench's table, with the first tenant's adapter as a complete one."""
    current = bench.app.fleet.directory.table
    assert current is not None
    generation = Generation(current.generation + 1_000)
    table = a_table([a_route(bench.node)], generation=generation, keys=bench.keys)
    file = ArtifactFile(path=CONFIG_FILE, size_bytes=1, sha256="a" * 64)
    adapter = AdapterEntry(
        adapter_id=adapter_id,
        name=name,
        tenant_id=TenantId("acme"),
        model_id=ModelId("m"),
        rank=4,
        artifact=Artifact(source=f"cluster:adapters/{adapter_id}", files=(file,), digest="b" * 64),
    )
    deployments = tuple(
        msgspec.structs.replace(entry, adapter_rank_max=16) for entry in table.deployments
    )
    bench.app.fleet.adopt(
        msgspec.structs.replace(
            table,
            adapters=(adapter,),
            deployments=deployments,
        )
    )


async def view_of(
    http: aiohttp.ClientSession, key: str, document: Any, own: Objects
) -> dict[str, Answered]:
    """Return what a tenant reads of its objects, by path."""
    view = {}
    for method, path, operation in operations(document):
        if method != "GET" or not operation.get("security", True) or path == "/v1/models/{model}":
            continue
        required = [p["name"] for p in operation["parameters"] if p["in"] == "query"]
        if path == "/ai/models/schema":
            assert "model" in required
            continue
        names = re.findall(r"\{(\w+)\}", path)
        paths = [path]
        for name in names:
            paths = [one.replace(f"{{{name}}}", i) for one in paths for i in own.ids[name]]
        for one in paths:
            view[one] = await send(http, key, Attempt("GET", one, "", None, is_form=False))
    return view


async def test_no_route_gives_a_tenant_an_object_of_another(
    bench: BatchBench, admin: Admin
) -> None:
    adapters = await add_adapters(bench, admin)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{bench.app.port}") as http:
        async with http.get("/openapi.json") as answer:
            document = await answer.json()
        acme = await objects_of(bench, http, KEY, adapters[0])
        other = await objects_of(bench, http, OTHER_KEY, adapters[1])
        before = await view_of(http, KEY, document, acme)
        assert {answered.status for answered in before.values()} == {200}
        secret = {path for path, answered in before.items() if SECRET in answered.text}
        assert len(secret) >= 12, secret

        tried = 0
        for attempt in attempts(document, other, acme):
            for object_id in acme.all():
                unknown = object_id[:-1] + ("0" if object_id[-1] != "0" else "1")
                given = await send(http, OTHER_KEY, attempt.naming(object_id))
                made_up = await send(http, OTHER_KEY, attempt.naming(unknown))
                assert 400 <= given.status < 500, (attempt, object_id, given)
                assert without(given, *acme.all()) == without(made_up, unknown, *acme.all()), (
                    attempt
                )
                assert SECRET not in given.text.replace(object_id, ""), attempt
                tried += 1
        assert tried > 400, "each id at each place"

        seen = await view_of(http, OTHER_KEY, document, other)
        assert not [
            path
            for path, answered in seen.items()
            if any(found in answered.text for found in (SECRET, *acme.all()))
        ]
        assert await view_of(http, KEY, document, acme) == before
        chat = Attempt("POST", "/v1/chat/completions", "", {"model": "tiny", **CHAT}, is_form=False)
        assert (await send(http, OTHER_KEY, chat)).status == 200
    assert bench.node.request_headers[-1][headers.CACHE_SALT] == "other"
