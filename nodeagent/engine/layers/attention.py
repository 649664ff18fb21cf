"""Attention over paged KV: one padded call for all decodes, one call for each prompt chunk.

A query of a decode is one token; its grouped heads are folded into the query dimension, so that
keys and values are read once per KV head and never repeated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Segment:
    """One prompt chunk in the flat batch: rows [start, end) see the slots of their context."""

    start: int
    end: int
    slots: Tensor
    """KV slots [context] of all tokens up to the chunk's last."""
    mask: Tensor | None
    """[rows, context], True where seen; None where the chunk starts the sequence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where this step's tokens lie in the KV, and what each row attends to."""

    write_slots: Tensor
    """KV slot [tokens] that each row of the flat batch fills."""
    decodes: int
    """The first so many rows are decodes."""
    decode_slots: Tensor
    """[decodes, longest context], padded with slot 0."""
    decode_mask: Tensor
    """[decodes, 1, 1, longest context], True where seen."""
    segments: tuple[Segment, ...]


class LayerKV:
    """Keys and values of one layer, by slot."""

    def __init__(
        self, slots: int, kv_heads: int, head_dim: int, device: str, dtype: torch.dtype
    ) -> None:
        # Zeroed, not empty: masked slots are multiplied by zero, and zero times NaN is NaN.
        self.keys = torch.zeros(slots, kv_heads, head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(slots, kv_heads, head_dim, device=device, dtype=dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, kv: LayerKV, layout: Layout) -> Tensor:
    """Write this step's keys and values, then answer `query` [tokens, heads, head_dim]."""
    kv.keys.index_copy_(0, layout.write_slots, key)
    kv.values.index_copy_(0, layout.write_slots, value)
    answer = torch.empty_like(query)
    if layout.decodes:
        answer[: layout.decodes] = _decode(query[: layout.decodes], kv, layout)
    for segment in layout.segments:
        answer[segment.start : segment.end] = _prefill(
            query[segment.start : segment.end], kv, segment
        )
    return answer


def _decode(query: Tensor, kv: LayerKV, layout: Layout) -> Tensor:
    rows, heads, head_dim = query.shape
    kv_heads = kv.keys.shape[1]
    keys = kv.keys[layout.decode_slots].transpose(1, 2)
    values = kv.values[layout.decode_slots].transpose(1, 2)
    grouped = query.view(rows, kv_heads, heads // kv_heads, head_dim)
    answer = scaled_dot_product_attention(grouped, keys, values, attn_mask=layout.decode_mask)
    return answer.reshape(rows, heads, head_dim)


def _prefill(query: Tensor, kv: LayerKV, segment: Segment) -> Tensor:
    keys = kv.keys[segment.slots].transpose(0, 1).unsqueeze(0)
    values = kv.values[segment.slots].transpose(0, 1).unsqueeze(0)
    answer = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=segment.mask,
        is_causal=segment.mask is None,
        enable_gqa=True,
    )
    return answer[0].transpose(0, 1)
