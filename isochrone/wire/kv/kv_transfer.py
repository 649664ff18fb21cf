"""The transfer of a prompt's KV blocks from a prefill engine to a decode engine.

The decode node's agent runs the transfer. It sends the request to its own engine with TRANSFER,
which names the transfer, and the same request with TRANSFER and LEG to the prefill replica's node.
That node answers with the blocks of the prompt as they are computed (CONTENT_TYPE, see
`transfer_frames.py`), and the agent passes them to its own engine under TRANSFERS_PATH:

GET describes the prompt (ExpectedPrompt; with `?digests=1` also its blocks), POST takes blocks
(ReceivedBlocks), and DELETE tells the engine to compute what has not arrived. POST with `?shared=1`
takes blocks that the PoP shares: a part of the prompt, so that the request goes on waiting.

Between two engines of one node, the contents of blocks go through a window, memory that both map.
The agent issues a lease for it (WINDOW), and tells its own engine where the other one gives the
window away (WINDOW_SOCKET). The stream then has no blocks: the engines tell each other at that
socket where they are in the window. If the blocks go to another node, each agent shares a window
with its own engine in the same way, and the stream between the nodes has the blocks.

Engines of other vendors transfer KV themselves. Their requests name the source (ENGINE_FIELDS), and
a node gives another, at ADDRESS_PATH, the address at which its replica's engine listens.
"""

from typing import Annotated, Final

import msgspec

LEG: Final = "x-isochrone-leg"
PREFILL_LEG: Final = "prefill"
"""The value of LEG: read the prompt and answer with its KV blocks, without generating text."""

TRANSFER: Final = "x-isochrone-kv-transfer"
"""The transfer's id, 32 random hexadecimal digits. Digests in the stream depend on it."""

FIRST_BLOCK: Final = "x-isochrone-kv-first-block"
"""The first block that the decode engine lacks."""

KV_FORMAT: Final = "x-isochrone-kv-format"
"""The receiver's model and KV format, as in ExpectedPrompt. An engine with another one refuses
with status 409 before it computes or sends anything."""

WINDOW: Final = "x-isochrone-kv-window"
"""Agent to its engines: the lease of the transfer's window, 32 random hexadecimal digits. A node
relays it to its engine only if it has issued the lease itself."""

NO_WINDOW: Final = "none"
"""The value of WINDOW in the answer of a sending engine that was named a lease and has no window
free: the blocks are in the stream. The answer to a transfer through its window has no WINDOW."""

WINDOW_SOCKET: Final = "x-isochrone-kv-window-socket"
"""Agent to the receiving engine: the path of the socket for windows of the sending engine, or of
the agent itself for blocks of another node."""

WINDOW_SOCKET_NAME: Final = "kv-link.sock"
"""The file name of that socket, beside an engine's other one or in an agent's folder. Releases
whose engines speak another protocol there have another name, so that they exchange no windows."""

OTHER_FORMAT_STATUS: Final = 409

RECEIVER_STATUSES: Final = (404, 429)
"""Answers to a POST of blocks that say nothing about their sender: the request has begun or is
gone, or the receiving engine has no block free."""

CONTENT_TYPE: Final = "application/x-isochrone-kv"

HEAD_BYTES_MAX: Final = 256
"""The longest head of a stream. The head is sent before any block is read."""

TRANSFERS_PATH: Final = "/kv/transfers/"
ADDRESS_PATH: Final = "/kv/address"
"""POST with the replica's id in a header; answers with KvAddress."""

ENGINE_FIELDS: Final = (
    "kv_transfer_params",
    "ec_transfer_params",
    "disaggregated_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)
"""The fields of a request in which engines tell each other where KV is. They name hosts to pull
from, so that only nodes may set them: a client's are removed."""

NESTED_FIELDS: Final = "vllm_xargs"
"""A field of vLLM's requests whose entries stand beside those of ENGINE_FIELDS in the engine."""


Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""Numbers from another process, which may send any value. Bounded, because they are added up."""


class KvAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which other engines of a vendor transfer KV with this one.

    `engine_id` is its name among them, another one after each start; "" if it has none.
    """

    host: str
    port: int
    engine_id: str = ""


class ExpectedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of a request that waits for its KV.

    Of its `blocks` full blocks, the first `cached_blocks` are on the device, and the first
    `held_blocks` in some tier of the engine.
    """

    prompt_tokens: int
    blocks: int
    cached_blocks: int
    held_blocks: int
    block_tokens: int
    block_bytes: int = 0
    digests: tuple[bytes, ...] = ()
    """The digests of its blocks, if they were requested, up to the number that a query can name."""
    kv_format: str = ""
    """Hexadecimal digits that only engines with interchangeable blocks share; empty if the engine
    is of a release that does not say."""


class ReceivedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a complete transfer.

    `cached_tokens` were in the prefill engine's cache. That engine had sent the last block
    `after_prefill_ms` after the prompt was computed.
    """

    blocks: Count
    transfer_bytes: Count
    cached_tokens: Count
    after_prefill_ms: Milliseconds = 0.0


def is_transfer_id(text: str) -> bool:
    """Return whether `text` can be the id of a transfer."""
    return len(text) == 32 and all(digit in "0123456789abcdef" for digit in text)
