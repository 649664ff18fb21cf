"""What the scripts of this folder share: two tools, a form of answer, and how results are told.

Each script is called with the router's address, a key, a model and a prompt that asks for calls,
and prints by API what the library returned: `steps` (the calls, by step), `text` after the calls,
`streamed` (the same from a stream), `formed` (an answer in the form of City) and `refused` (the
error for an unknown model).
"""

import json
import sys
from collections.abc import Awaitable, Mapping
from typing import Any, Final

from pydantic import BaseModel

URL, KEY, MODEL, SCRIPT = sys.argv[1:5]
UNKNOWN: Final = "none"
STEPS_MAX: Final = 5
"""The most steps of a loop; the script needs three."""


class City(BaseModel):
    """A city."""

    name: str
    is_large: bool


def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"sunny in {city}"


def clock(zone: str) -> str:
    """Return the time in a zone."""
    return f"noon in {zone}"


async def refusal(request: Awaitable[object]) -> dict[str, Any]:
    """Return the name and status of the error that a request raises."""
    try:
        await request
    except Exception as error:
        return {"name": type(error).__name__, "status": getattr(error, "status_code", None)}
    return {}


def tell(results: Mapping[str, Any]) -> None:
    """Print results as one JSON object."""
    print(json.dumps(results))
