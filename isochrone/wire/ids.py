"""Id types, one per kind of object, so that the type checker finds mixed-up ids; their patterns."""

import re
from typing import Final, NewType

ClusterId = NewType("ClusterId", str)
PopId = NewType("PopId", str)
NodeId = NewType("NodeId", str)
RouterId = NewType("RouterId", str)
DeviceId = NewType("DeviceId", str)
ModelId = NewType("ModelId", str)
DeploymentId = NewType("DeploymentId", str)
ReplicaId = NewType("ReplicaId", str)
KeyId = NewType("KeyId", str)
TenantId = NewType("TenantId", str)
RequestId = NewType("RequestId", str)
BootId = NewType("BootId", str)
Generation = NewType("Generation", int)
Epoch = NewType("Epoch", int)

END: Final = r"$(?!\n)"
"""The end of the text. In Python `$` also matches before a final newline, and names go into HTTP
headers."""

NAME_PATTERN: Final = rf"^[a-z0-9]([a-z0-9._-]{{0,61}}[a-z0-9])?{END}"
MODEL_NAME_PATTERN: Final = rf"^@?[A-Za-z0-9]([A-Za-z0-9._/:-]{{0,126}}[A-Za-z0-9])?{END}"
POP_PATTERN: Final = rf"^[a-z]{{3}}{END}"
COUNTRY_PATTERN: Final = rf"^[A-Z]{{2}}{END}"
ID_PATTERN: Final = rf"^[A-Za-z0-9]([A-Za-z0-9._~-]{{0,126}}[A-Za-z0-9])?{END}"
ADDRESS_PATTERN: Final = rf"^((https?://)?[A-Za-z0-9._:\[\]-]{{1,255}}/?)?{END}"
DATA_URL_PATTERN: Final = "^data:"
IMAGE_URL_PATTERN: Final = "^(data:|https://)"
REQUEST_ID_PATTERN: Final = rf"^[A-Za-z0-9._-]{{1,64}}{END}"

PATTERN_DESCRIPTIONS: Final = {
    NAME_PATTERN: "lower-case letters, digits, dots, dashes and underscores, at most 63",
    MODEL_NAME_PATTERN: "letters, digits, dots, dashes, underscores, slashes and colons, at most"
    " 128, perhaps after an `@`",
    ID_PATTERN: "letters, digits, dots, dashes, underscores and tildes, at most 128",
    ADDRESS_PATTERN: "an address such as `https://10.0.0.7:9000`",
    DATA_URL_PATTERN: "a `data:` URL with the file in base64 (other URLs are not fetched)",
    IMAGE_URL_PATTERN: "a `data:` URL with the file in base64 (or an `https://` link, where the"
    " operator lets routers fetch it)",
    POP_PATTERN: "three lower-case letters, such as `ams`",
    COUNTRY_PATTERN: "two capital letters, such as `NL`",
}
"""The values that each pattern accepts, in words for error messages."""

_NAME = re.compile(NAME_PATTERN)
_POP = re.compile(POP_PATTERN)
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)


def is_name(text: str) -> bool:
    """Return True if `text` is a valid name of a node, router, deployment or tenant (RFC 1123)."""
    return _NAME.match(text) is not None


def is_pop(text: str) -> bool:
    """Return True if `text` has the form of a PoP id: an IATA code in lower case."""
    return _POP.match(text) is not None


def is_request_id(text: str) -> bool:
    """Return True if a client's `x-request-id` can be kept; the router replaces any other."""
    return _REQUEST_ID.match(text) is not None
