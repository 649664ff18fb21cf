"""Builds the fields by which vendor engines hand over the KV of a prompt, in both legs' requests.

A prefill leg reads the prompt, and a decode leg generates the answer from its KV, which the engines
move by themselves. The fields that they need are defined by the driver, as data: a body in, a body
out. `disaggregation/handshake_leg.py` sends them.

Sources: vLLM's NixlConnector and MooncakeConnector (0.32), SGLang's `disaggregation/mini_lb.py` and
`managers/io_struct.py` (0.5), TensorRT-LLM's `serve/openai_disagg_service.py` (1.2).
"""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from isochrone.wire.kv.kv_transfer import KvAddress

Fields = dict[str, Any]
"""A request's or an answer's JSON object. Values that are only passed on may be msgspec.Raw."""

ROOM_BITS: Final = 63
"""SGLang's bootstrap rooms are signed 64-bit numbers."""

NO_BOOTSTRAP: Final = "2.2.2.2"
"""The host with which SGLang's own health check says that no KV will come (FAKE_BOOTSTRAP_HOST)."""

_PARSED: Final = frozenset({"n", "best_of", "echo", "prompt_logprobs"})


class HandshakeFailed(Exception):
    """An answer to a prefill leg has nothing that a decode leg could use."""


class Handshake(Protocol):
    """The protocol between a prefill and a decode engine of one vendor."""

    is_concurrent: bool
    """Whether both legs run at once: the decode engine waits for the KV by itself."""
    needs_address: bool
    """Whether the decode leg's request says where the prefill engine is."""
    needs_prefill: bool
    """Whether a replica that decodes cannot read a prompt itself."""
    canary_fields: Mapping[str, Any]
    """The fields that a test request needs, which has one leg."""

    def can_split(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a request with these fields can have two legs."""
        ...

    def prefill(self, fields: Fields, transfer: str, address: KvAddress | None) -> Fields:
        """Return the body of the prefill leg. `transfer` is its id, 32 hexadecimal digits."""
        ...

    def decode(
        self, fields: Fields, transfer: str, address: KvAddress | None, answer: Fields
    ) -> Fields:
        """Return the body of the decode leg; `answer` is {} if both run at once.

        Raises HandshakeFailed if the prefill leg's answer has no KV to fetch.
        """
        ...


class _VllmHandshake:
    """The common part of NIXL and Mooncake: one leg after the other, `kv_transfer_params`."""

    is_concurrent = False
    needs_prefill = False
    canary_fields: Mapping[str, Any] = {}

    def can_split(self, fields: Mapping[str, Any]) -> bool:
        """Return True for one prompt and one answer, without log probabilities of the prompt."""
        return has_one_sequence(fields)

    def _one_token(self, fields: Fields, params: Mapping[str, Any]) -> Fields:
        """Return a request that reads the prompt and generates one token, the fewest possible."""
        body = {name: fields[name] for name in fields.keys() - {"stream_options", "min_tokens"}}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        return {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}


class NixlHandshake(_VllmHandshake):
    """vLLM's NixlConnector: the prefill leg's answer says where its blocks are."""

    needs_address = False

    def prefill(self, fields: Fields, transfer: str, address: KvAddress | None) -> Fields:
        """Return a request whose blocks the engine keeps for another one."""
        place = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        params = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(place)}
        return self._one_token(fields, params)

    def decode(
        self, fields: Fields, transfer: str, address: KvAddress | None, answer: Fields
    ) -> Fields:
        """Return the request with the answer's parameters, unchanged."""
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict) or not params.get("remote_block_ids"):
            raise HandshakeFailed("the prefill leg's answer names no blocks")
        return {**fields, "kv_transfer_params": params}


class MooncakeHandshake(_VllmHandshake):
    """vLLM's MooncakeConnector: both legs name the transfer, the second one the first engine."""

    needs_address = True

    def prefill(self, fields: Fields, transfer: str, address: KvAddress | None) -> Fields:
        """Return a request whose blocks the engine keeps under the transfer's id."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        return self._one_token(fields, params)

    def decode(
        self, fields: Fields, transfer: str, address: KvAddress | None, answer: Fields
    ) -> Fields:
        """Return the request with the other engine's bootstrap server."""
        if address is None:
            raise HandshakeFailed("the prefill engine has no bootstrap server")
        if _first_choice(answer).get("finish_reason") != "length":
            # It keeps no blocks then, and a decode engine would wait for them (MOONCAKE_ABORT_S).
            raise HandshakeFailed("the answer ends with its first token")
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://{_host(address.host)}:{address.port}",
            "remote_engine_id": address.engine_id,
            "transfer_id": transfer,
        }
        return {**fields, "kv_transfer_params": params}


class SglangHandshake:
    """SGLang: the same request to both at once, matched by its bootstrap room."""

    is_concurrent = True
    needs_address = True
    needs_prefill = True
    canary_fields: Mapping[str, Any] = {"bootstrap_host": NO_BOOTSTRAP, "bootstrap_room": 0}

    def can_split(self, fields: Mapping[str, Any]) -> bool:
        """Return True: SGLang gives each sequence of a request a bootstrap room of its own."""
        return True

    def prefill(self, fields: Fields, transfer: str, address: KvAddress | None) -> Fields:
        """Return the request with its bootstrap room; its answer is only awaited, not passed on."""
        body = {name: fields[name] for name in fields.keys() - {"stream_options"}}
        return {**body, "stream": False, **self._room(transfer, address)}

    def decode(
        self, fields: Fields, transfer: str, address: KvAddress | None, answer: Fields
    ) -> Fields:
        """Return the request with its bootstrap room."""
        return {**fields, **self._room(transfer, address)}

    def _room(self, transfer: str, address: KvAddress | None) -> Fields:
        if address is None:
            raise HandshakeFailed("the prefill engine has no bootstrap server")
        return {
            "bootstrap_host": _host(address.host),
            "bootstrap_port": address.port,
            "bootstrap_room": int(transfer, 16) >> (4 * len(transfer) - ROOM_BITS),
        }


class TensorRtLlmHandshake:
    """TensorRT-LLM: the context phase first; its answer has the state and the prompt's tokens."""

    is_concurrent = False
    needs_address = False
    needs_prefill = False
    canary_fields: Mapping[str, Any] = {}

    def can_split(self, fields: Mapping[str, Any]) -> bool:
        """Return True for one prompt and one answer."""
        return has_one_sequence(fields)

    def prefill(self, fields: Fields, transfer: str, address: KvAddress | None) -> Fields:
        """Return a request for the context phase only."""
        body = {name: fields[name] for name in fields.keys() - {"stream_options"}}
        return {
            **body,
            "stream": False,
            "disaggregated_params": {"request_type": "context_only"},
        }

    def decode(
        self, fields: Fields, transfer: str, address: KvAddress | None, answer: Fields
    ) -> Fields:
        """Return a request for the generation phase, with the prompt as tokens."""
        first = _first_choice(answer)
        params = first.get("disaggregated_params")
        tokens = answer.get("prompt_token_ids")
        if not isinstance(params, dict) or not isinstance(tokens, list):
            raise HandshakeFailed("the context phase's answer has no state")
        if first.get("finish_reason") not in ("length", "not_finished"):
            raise HandshakeFailed("the answer ends with its first token")
        body = {**fields, "disaggregated_params": {**params, "request_type": "generation_only"}}
        body["prompt" if "prompt" in fields else "prompt_token_ids"] = tokens
        return body


def decode_fields(body: bytes) -> Fields:
    """Return the fields of a request's body; only what `can_split` looks at is parsed.

    Raises msgspec.DecodeError.
    """
    fields: Fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name in _PARSED & fields.keys():
        fields[name] = msgspec.json.decode(fields[name])
    return fields


def has_one_sequence(fields: Mapping[str, Any]) -> bool:
    """Return whether a request has one prompt and one answer, and needs no output of the prompt."""
    prompt = bytes(fields.get("prompt", b""))
    # A list of texts, or of lists of tokens, is several prompts.
    if prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"["):
        return False
    if fields.get("echo") or fields.get("prompt_logprobs") is not None:
        return False
    return fields.get("n") in (None, 1) and fields.get("best_of") in (None, 1)


def cached_tokens(answer: Mapping[str, Any]) -> int:
    """Return how many prompt tokens a prefill engine had cached; 0 if its answer does not say."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    count = details.get("cached_tokens") if isinstance(details, dict) else None
    return count if isinstance(count, int) and count > 0 else 0


def _first_choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an answer's first choice; {} if it has none."""
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
