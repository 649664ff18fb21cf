"""A route of the public API as its OpenAPI document describes it, and types that routes share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

Surface = Literal["openai", "anthropic", "workers_ai", "open"]
"""The API whose error format a route uses; an `open` route needs no key."""

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
SOUND: Final = "audio/*"
BYTES: Final = "application/octet-stream"
TEXT: Final = "text/plain"

PageLimit = Annotated[int, Meta(ge=1, le=100)]
FileLimit = Annotated[int, Meta(ge=1, le=10_000)]
Order = Literal["asc", "desc"]

PAGE: Final[Mapping[str, Any]] = {"after": str, "limit": PageLimit}
ORDERED_PAGE: Final[Mapping[str, Any]] = {**PAGE, "order": Order}


@dataclass(frozen=True, kw_only=True)
class PublicRoute:
    """One route.

    - `body`: the struct of a JSON body, or of a form's fields if `files` names its files.
      Several structs: the body is one of them. `fields` have a narrower type than in the struct.
    - `answer`: the struct of a JSON answer. `is_list`: OpenAI's list of them. `media_types` are
      those of answers that are not JSON.
    - `query`: the type of each query parameter, or a struct that has them.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    surface: Surface = "openai"
    body: Any = None
    files: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    answer: Any = None
    is_list: bool = False
    media_types: tuple[str, ...] = ()
    query: Any = None
    is_inference: bool = False
