"""How a model is split: every weight is on some rank, and impossible splits are refused."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.distributed.shards import ModelShard, ParallelConfig
from nodeagent.engine.scheduler.batch import Batch, BatchChunk
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.workers.commands import Command, RunStep, run_step_command

SHAPE = DecoderShape(
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
def test_shards_make_up_the_whole_model(tensor: int, pipeline: int, data: st.DataObject) -> None:
    expert = data.draw(st.sampled_from([n for n in (1, 2) if tensor % n == 0]))
    split = ParallelConfig(tensor, pipeline, expert)
    split.check(SHAPE)
    shards = [ModelShard(SHAPE, split, rank) for rank in range(split.ranks)]
    assert {layer for shard in shards for layer in shard.layers} == set(range(7))
    for stage in range(pipeline):
        ranks = shards[stage * tensor : (stage + 1) * tensor]
        assert [head for shard in ranks for head in shard.heads] == list(range(12))
        assert [token for shard in ranks for token in shard.tokens] == list(range(101))
        assert {head for shard in ranks for head in shard.kv_heads} == set(range(4))
        # Every column of every expert is on exactly one rank.
        columns_held = []
        for shard in ranks:
            part = shard.slice_of("model.layers.0.mlp.experts.0.down_proj.weight", (64, 1))
            columns = range(part.start, part.end) if part else range(96)
            columns_held += [(expert, column) for expert in shard.experts for column in columns]
        assert sorted(columns_held) == [
            (expert, column) for expert in range(6) for column in range(96)
        ]
    for shard in shards:
        assert shard.shape.heads // shard.shape.kv_heads * shard.shape.kv_heads == len(shard.heads)
        # The rank has the KV head of each of its query heads.
        assert {head // 3 for head in shard.heads} == set(shard.kv_heads)


def test_a_weight_is_sliced_along_rows_or_columns() -> None:
    shard = ModelShard(SHAPE, ParallelConfig(tensor=2), rank=1)
    rows = shard.slice_of("model.layers.3.self_attn.k_proj.weight", (16, 64))
    assert rows is not None
    assert (rows.whole, rows.axis, rows.start, rows.end) == ((32, 64), 0, 16, 32)
    bias = shard.slice_of("model.layers.3.self_attn.q_proj.bias", (48,))
    assert bias is not None
    assert (bias.whole, bias.shape, bias.start) == ((96,), (48,), 48)
    columns = shard.slice_of("model.layers.3.self_attn.o_proj.weight", (64, 48))
    assert columns is not None
    assert (columns.whole, columns.axis, columns.start) == ((64, 96), 1, 48)
    assert columns.shape == (64, 48)
    assert shard.slice_of("model.layers.3.input_layernorm.weight", (64,)) is None
    assert shard.slice_of("model.layers.3.mlp.gate.weight", (6, 64)) is None
    assert ModelShard(SHAPE).slice_of("lm_head.weight", (101, 64)) is None


@pytest.mark.parametrize(
    ("split", "change", "error"),
    [
        (ParallelConfig(tensor=5), {}, "tensor_parallel 5: 12 heads do not divide by it"),
        (ParallelConfig(tensor=6), {}, "4 KV heads neither divide by it nor into it"),
        (ParallelConfig(tensor=4), {"intermediate": 94}, "an MLP 94 wide does not divide by 4"),
        (ParallelConfig(tensor=2), {"vocabulary": 1}, "the vocabulary has 1 tokens"),
        (ParallelConfig(pipeline=8), {}, "pipeline_parallel 8: it has 7 layers"),
        (
            ParallelConfig(tensor=4, expert=4),
            {},
            "expert_parallel 4: tensor_parallel 4 and its 6 experts",
        ),
        (ParallelConfig(expert=2), {}, "expert_parallel 2: tensor_parallel 1"),
        (ParallelConfig(tensor=2, expert=2), {"experts": 0}, "its no experts must divide"),
    ],
)
def test_an_impossible_split_is_refused(
    split: ParallelConfig, change: dict[str, Any], error: str
) -> None:
    with pytest.raises(CheckpointError, match=error):
        split.check(replace(SHAPE, **change))


def test_a_step_command_contains_the_whole_batch() -> None:
    decode = Sequence(1, [5, 6, 7], StopConditions(9, frozenset()), computed_tokens=2, blocks=[4])
    prompt = Sequence(2, list(range(20)), StopConditions(9, frozenset()), blocks=[2, 3])
    verified = BatchChunk(decode, 2, 3, (8, 9))
    batch = Batch((BatchChunk(decode, 2, 1),), (BatchChunk(prompt, 0, 18),), verifies=(verified,))
    command = msgspec.msgpack.decode(msgspec.msgpack.encode(run_step_command(batch)), type=Command)
    assert isinstance(command, RunStep)
    assert len(command.chunks) == 3
    for sent, chunk in zip(command.chunks, batch.chunks, strict=True):
        assert sent.blocks == chunk.sequence.blocks
        for name in ("start", "tokens", "ids", "drafts", "samples"):
            assert getattr(sent, name) == getattr(chunk, name)
