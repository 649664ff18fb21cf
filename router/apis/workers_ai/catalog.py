"""Workers AI's lists of models, tasks and authors, made from the route table. Pure.

Fields are those of Cloudflare's REST API reference, "List models" (`/ai/models/search`) and its
neighbours. `source` is 1 throughout, as there for models that are served by the service itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.routes import DeploymentEntry
from router.apis.openai.schema import ChatRequest
from router.apis.workers_ai.translate import FIELDS_OF_TASK, RunRequest

SOURCE: Final = 1
PER_PAGE_DEFAULT: Final = 20
PER_PAGE_MAX: Final = 1000


class TaskDescription(NamedTuple):
    """A task as the lists name it, and the fields of `/ai/run` that decide for it."""

    name: str
    description: str
    deciding_fields: tuple[str, ...]
    output: type
    is_list: bool = False


class _GeneratedText(msgspec.Struct):
    response: str | dict[str, Any]
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class _Vectors(msgspec.Struct):
    shape: list[int]
    data: list[list[float]]


class _RankedContext(msgspec.Struct):
    id: int
    score: float


class _Ranking(msgspec.Struct):
    response: list[_RankedContext]


class _Class(msgspec.Struct):
    label: str
    score: float


TASKS: Final[Mapping[str, TaskDescription]] = {
    "chat": TaskDescription(
        "Text Generation",
        "Generates text from a prompt or from messages",
        ("prompt", "messages"),
        _GeneratedText,
    ),
    "embedding": TaskDescription(
        "Text Embeddings", "Turns texts into vectors of numbers", ("text",), _Vectors
    ),
    "rerank": TaskDescription(
        "Text Classification", "Orders texts by how well they answer a query", ("query",), _Ranking
    ),
    "classify": TaskDescription(
        *("Text Classification", "Names the class of a text, with a score for each"),
        ("text",),
        _Class,
        is_list=True,
    ),
}
"""The kinds of model that `/ai/run` serves. Workers AI lists its rerankers under Text
Classification. Models of another kind are not served by `/ai/run`, and not listed."""


class PageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query parameters of `/ai/tasks/search` and `/ai/authors/search`.

    Cloudflare's SDKs expect these lists in one page, so it is as large as a page may be.
    """

    page: int = 1
    per_page: int = PER_PAGE_MAX


class ModelQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query parameters of `/ai/models/search`. No model is experimental here."""

    search: str = ""
    task: str = ""
    author: str = ""
    source: int = SOURCE
    hide_experimental: bool = False
    include_deprecated: bool = False
    page: int = 1
    per_page: int = PER_PAGE_DEFAULT


class SchemaQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query parameter of `/ai/models/schema`."""

    model: str


def model_page(
    entries: Iterable[DeploymentEntry], query: ModelQuery, now_unix_s: float
) -> dict[str, Any]:
    """Return one page of the model list, as an envelope."""
    return _page(
        [_model(e) for e in entries if e.kind in TASKS and _matches(e, query, now_unix_s)], query
    )


def task_page(entries: Iterable[DeploymentEntry], query: PageQuery) -> dict[str, Any]:
    """Return one page of the tasks that the models of `entries` serve, as an envelope."""
    kinds = {entry.kind for entry in entries}
    return _page([_task(kind) for kind in TASKS if kind in kinds], query)


def author_page(entries: Iterable[DeploymentEntry], query: PageQuery) -> dict[str, Any]:
    """Return one page of the authors in the names of `entries`, as an envelope."""
    authors = sorted({author_of(entry.name) for entry in entries if entry.kind in TASKS} - {""})
    return _page([{"id": author, "name": author} for author in authors], query)


def model_schema(entry: DeploymentEntry) -> dict[str, Any]:
    """Return the JSON Schemas of a model's `/ai/run` input and of its result."""
    if entry.kind not in TASKS:
        reason = f"it is a model of kind {entry.kind!r}, which /ai/run does not serve"
        raise ApiError(ErrorCode.NOT_FOUND, f"cannot describe {entry.name!r}: {reason}")
    task = TASKS[entry.kind]
    inputs = [input_schema(name, "#/$defs/{name}") for name in task.deciding_fields]
    # References in a schema begin at its root.
    definitions: dict[str, Any] = {}
    for schema in inputs:
        definitions |= schema.pop("$defs")
    described = msgspec.json.schema(task.output)
    output = {**described["$defs"][task.output.__name__], "$defs": described["$defs"]}
    if task.is_list:
        output = {"type": "array", "items": output}
    return {
        "input": {"type": "object", "oneOf": inputs, "$defs": definitions},
        "output": output,
    }


def author_of(name: str) -> str:
    """Return the author in a name such as `@cf/meta/llama` or `meta/llama`, or an empty text."""
    parts = name.split("/")
    if parts[0].startswith("@"):
        parts = parts[1:]
    return parts[0] if len(parts) > 1 else ""


def envelope(result: object) -> dict[str, Any]:
    """Return a successful answer in Workers AI's envelope."""
    return {"result": result, "success": True, "errors": [], "messages": []}


def _page(rows: Sequence[object], query: PageQuery | ModelQuery) -> dict[str, Any]:
    """Return one page of a list, as an envelope; past the last it is empty. Raises ApiError."""
    if query.page < 1 or not 1 <= query.per_page <= PER_PAGE_MAX:
        reason = f"page counts from 1 and per_page is 1 to {PER_PAGE_MAX}"
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot list: {reason}", param="page")
    first = (query.page - 1) * query.per_page
    page = rows[first : first + query.per_page]
    info = {
        "count": len(page),
        "page": query.page,
        "per_page": query.per_page,
        "total_count": len(rows),
    }
    return {**envelope(page), "result_info": info}


def _matches(entry: DeploymentEntry, query: ModelQuery, now_unix_s: float) -> bool:
    deprecation = entry.deprecation
    is_retired = deprecation is not None and 0 < deprecation.sunset_at <= now_unix_s
    return (
        query.search.lower() in entry.name.lower()
        and query.task.lower() in ("", TASKS[entry.kind].name.lower())
        and query.author.lower() in ("", author_of(entry.name).lower())
        and query.source == SOURCE
        and (query.include_deprecated or not is_retired)
    )


def _model(entry: DeploymentEntry) -> dict[str, Any]:
    properties: list[dict[str, Any]] = [_property("context_window", str(entry.context_tokens))]
    price = entry.price
    if price is not None:
        cached = price.cached_per_million
        units = {
            "per M input tokens": price.prompt_per_million,
            "per M cached input tokens": price.prompt_per_million if cached is None else cached,
            "per M output tokens": price.output_per_million,
        }
        rows = [{"unit": unit, "price": amount} for unit, amount in units.items()]
        properties.append(_property("price", rows))
    if entry.deprecation is not None and entry.deprecation.sunset_at:
        day = datetime.fromtimestamp(entry.deprecation.sunset_at, UTC).date()
        properties.append(_property("planned_deprecation_date", day.isoformat()))
    return {
        "id": entry.deployment_id,
        "source": SOURCE,
        "name": entry.name,
        "description": "",
        "task": _task(entry.kind),
        "tags": [],
        "properties": properties,
    }


def _property(name: str, value: object) -> dict[str, Any]:
    return {"property_id": name, "value": value}


def _task(kind: str) -> dict[str, str]:
    task = TASKS[kind]
    return {"id": kind, "name": task.name, "description": task.description}


def input_schema(deciding_field: str, ref_template: str) -> dict[str, Any]:
    """Return the schema of one kind of input: the fields that `/ai/run` honours with it.

    Schemas that it refers to, by `ref_template`, are in its `$defs`.
    """
    honoured = FIELDS_OF_TASK[deciding_field]
    types = {field.name: field.type for field in msgspec.structs.fields(ChatRequest)}
    types |= {field.name: field.type for field in msgspec.structs.fields(RunRequest)}
    known = sorted(honoured & types.keys())
    schemas, definitions = msgspec.json.schema_components(
        [types[name] for name in known], ref_template=ref_template
    )
    properties: dict[str, dict[str, Any]] = {name: {} for name in sorted(honoured)}
    properties |= zip(known, schemas, strict=True)
    return {
        "type": "object",
        "properties": properties,
        "required": ["query", "contexts"] if deciding_field == "query" else [deciding_field],
        "additionalProperties": False,
        "$defs": definitions,
    }
