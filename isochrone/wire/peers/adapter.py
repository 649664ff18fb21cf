"""LoRA adapters: the entry that routers hold, and how a request names its adapter to a node.

An adapter is an artifact of two files, as PEFT writes them. It never changes once it is complete.
"""

from base64 import b64decode, b64encode
from typing import Annotated, Final

import msgspec

from isochrone.wire.digits import parse_digits
from isochrone.wire.ids import END, ID_PATTERN, ModelId, TenantId
from isochrone.wire.models.model import Artifact, ModelName
from isochrone.wire.peers.assignment import PeerSource

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
ADAPTER_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)

CLUSTER_SCHEME: Final = "cluster:"
"""The URL scheme of files that clients have uploaded: the acting scheduler serves them."""

ADAPTER_NAME_PATTERN: Final = rf"^[A-Za-z0-9]([A-Za-z0-9._-]{{0,62}}[A-Za-z0-9])?{END}"
AdapterId = Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
AdapterName = Annotated[str, msgspec.Meta(pattern=ADAPTER_NAME_PATTERN)]

_MEBIBYTE: Final = 1024 * 1024


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An adapter for deployments of the model `model_id`, as routers hold it.

    Other tenants than `tenant_id` may use it only if it `is_public`. Without `artifact` its files
    are not complete yet.
    """

    adapter_id: AdapterId
    name: str
    tenant_id: TenantId
    model_id: ModelId
    is_public: bool = False
    rank: int = 0
    artifact: Artifact | None = None
    modified_at: float = 0.0
    """Unix time from which it has been as it is: its files complete, and public if it is."""

    @property
    def size_mib(self) -> float:
        """The size of its files."""
        return self.artifact.size_bytes / _MEBIBYTE if self.artifact is not None else 0.0


class RequestAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter that a request names, as the router tells it to the node: in a header.

    `holders` are nodes that had it loaded lately, from which it may be fetched.
    """

    adapter_id: AdapterId
    model_id: ModelName
    artifact: Artifact
    holders: tuple[PeerSource, ...] = ()


class LoadedAdapters(msgspec.Struct, frozen=True):
    """A node's answer to a request with an adapter: those that the replica has loaded.

    `load_ms` is how long this request waited for its own, 0 if that was loaded before.
    """

    load_ms: int
    adapter_ids: tuple[str, ...]


class MalformedAdapter(ValueError):
    """The header that names an adapter cannot be read."""


def format_request_adapter(adapter: RequestAdapter) -> str:
    """Return an adapter as the value of a header."""
    return b64encode(msgspec.msgpack.encode(adapter)).decode()


_REQUEST_ADAPTER: Final = msgspec.msgpack.Decoder(RequestAdapter)


def parse_request_adapter(value: str) -> RequestAdapter:
    """Read the value of a header. Raises MalformedAdapter."""
    try:
        return _REQUEST_ADAPTER.decode(b64decode(value, validate=True))
    except ValueError as error:
        raise MalformedAdapter(f"cannot read the adapter of the request: {error}") from error


LOADED_MAX: Final = 256
"""The most loaded adapters that one header names."""


def format_loaded_adapters(loaded: LoadedAdapters) -> str:
    """Format as a header value: `120 ft-a ft-b`."""
    return " ".join((str(loaded.load_ms), *loaded.adapter_ids[-LOADED_MAX:]))


def parse_loaded_adapters(value: str) -> LoadedAdapters | None:
    """Parse a header value; None if it is malformed."""
    number, *adapter_ids = value.split(" ", LOADED_MAX)
    load_ms = parse_digits(number)
    return None if load_ms is None else LoadedAdapters(load_ms, tuple(adapter_ids))
