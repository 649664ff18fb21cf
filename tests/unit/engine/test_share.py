"""How a model is split: every weight has its place, and what cannot be split is said."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.engine.distributed.commands import Order, Run, told
from nodeagent.engine.distributed.shards import Share, Split
from nodeagent.engine.model.shape import CheckpointError, ModelShape
from nodeagent.engine.scheduler.batching import Batch, Chunk
from nodeagent.engine.scheduler.sequence import Ending, Sequence

SHAPE = ModelShape(
    layers=7,
    hidden=64,
    intermediate=96,
    heads=12,
    kv_heads=4,
    head_dim=8,
    vocabulary=101,
    context_tokens=64,
    rms_epsilon=1e-5,
    rope_theta=1e4,
    experts=6,
    experts_per_token=2,
)


@given(tensor=st.sampled_from([1, 2, 4, 12]), pipeline=st.integers(1, 7), data=st.data())
def test_shares_make_up_the_whole(tensor: int, pipeline: int, data: st.DataObject) -> None:
    expert = data.draw(st.sampled_from([n for n in (1, 2) if tensor % n == 0]))
    split = Split(tensor, pipeline, expert)
    split.check(SHAPE)
    shares = [Share(SHAPE, split, rank) for rank in range(split.ranks)]
    assert {layer for share in shares for layer in share.layers} == set(range(7))
    for stage in range(pipeline):
        ranks = shares[stage * tensor : (stage + 1) * tensor]
        assert [head for share in ranks for head in share.heads] == list(range(12))
        assert [token for share in ranks for token in share.tokens] == list(range(101))
        assert {head for share in ranks for head in share.kv_heads} == set(range(4))
        # Each expert's each column is somewhere, and once.
        held = []
        for share in ranks:
            cut = share.cut("model.layers.0.mlp.experts.0.down_proj.weight", (64, 1))
            columns = range(cut.start, cut.end) if cut else range(96)
            held += [(expert, column) for expert in share.experts for column in columns]
        assert sorted(held) == [(expert, column) for expert in range(6) for column in range(96)]
    for share in shares:
        assert share.shape.heads // share.shape.kv_heads * share.shape.kv_heads == len(share.heads)
        # The KV head of each query head is here.
        assert {head // 3 for head in share.heads} == set(share.kv_heads)


def test_a_cut_is_of_rows_or_of_columns() -> None:
    share = Share(SHAPE, Split(tensor=2), rank=1)
    rows = share.cut("model.layers.3.self_attn.k_proj.weight", (16, 64))
    assert rows is not None
    assert (rows.whole, rows.axis, rows.start, rows.end) == ((32, 64), 0, 16, 32)
    bias = share.cut("model.layers.3.self_attn.q_proj.bias", (48,))
    assert bias is not None
    assert (bias.whole, bias.shape, bias.start) == ((96,), (48,), 48)
    columns = share.cut("model.layers.3.self_attn.o_proj.weight", (64, 48))
    assert columns is not None
    assert (columns.whole, columns.axis, columns.start) == ((64, 96), 1, 48)
    assert columns.shape == (64, 48)
    assert share.cut("model.layers.3.input_layernorm.weight", (64,)) is None
    assert share.cut("model.layers.3.mlp.gate.weight", (6, 64)) is None
    assert Share(SHAPE).cut("lm_head.weight", (101, 64)) is None


@pytest.mark.parametrize(
    ("split", "change", "said"),
    [
        (Split(tensor=5), {}, "tensor_parallel 5: 12 heads do not divide by it"),
        (Split(tensor=6), {}, "4 KV heads neither divide by it nor into it"),
        (Split(tensor=4), {"intermediate": 94}, "an MLP 94 wide does not divide by 4"),
        (Split(tensor=2), {"vocabulary": 1}, "the vocabulary has 1 tokens"),
        (Split(pipeline=8), {}, "pipeline_parallel 8: it has 7 layers"),
        (Split(tensor=4, expert=4), {}, "expert_parallel 4: tensor_parallel 4 and its 6 experts"),
        (Split(expert=2), {}, "expert_parallel 2: tensor_parallel 1"),
        (Split(tensor=2, expert=2), {"experts": 0}, "its no experts must divide"),
    ],
)
def test_what_cannot_be_split_is_refused(split: Split, change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        split.check(replace(SHAPE, **change))


def test_a_step_is_told_whole() -> None:
    decode = Sequence(1, [5, 6, 7], Ending(9, frozenset()), computed=2, blocks=[4])
    prompt = Sequence(2, list(range(20)), Ending(9, frozenset()), blocks=[2, 3])
    verified = Chunk(decode, 2, 3, (8, 9))
    batch = Batch((Chunk(decode, 2, 1),), (Chunk(prompt, 0, 18),), verifies=(verified,))
    order = msgspec.msgpack.decode(msgspec.msgpack.encode(told(batch)), type=Order)
    assert isinstance(order, Run)
    assert len(order.chunks) == 3
    for told_piece, chunk in zip(order.chunks, batch.chunks, strict=True):
        assert told_piece.blocks == chunk.sequence.blocks
        for name in ("start", "tokens", "ids", "drafts", "samples"):
            assert getattr(told_piece, name) == getattr(chunk, name)
