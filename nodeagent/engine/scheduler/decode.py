"""Decides the decodes of a step: each decoding sequence computes one token, and maybe drafts.

When no KV block is free, the running sequence that is last in the fair queue is preempted. The
first one therefore always makes progress, and in time every one does.
"""

from typing import NamedTuple

from nodeagent.engine.scheduler.batch import BatchChunk
from nodeagent.engine.scheduler.run_queues import RunQueues
from nodeagent.engine.scheduler.sequence import Sequence


class Decodes(NamedTuple):
    """The decodes of a step."""

    plain: list[BatchChunk]
    """One token each, shortest context first."""
    with_drafts: list[BatchChunk]


def schedule_decodes(queues: RunQueues, sequences_max: int, *, may_draft: bool) -> Decodes:
    """Give a token to each decoding sequence in queue order, `sequences_max` of them at most."""
    plain: list[BatchChunk] = []
    with_drafts: list[BatchChunk] = []
    for sequence in list(queues.running):
        if len(plain) + len(with_drafts) == sequences_max:
            break
        # An earlier sequence of this loop may have preempted this one.
        if sequence not in queues.running or not sequence.is_decoding:
            continue
        if not _reserve_next_token(queues, sequence):
            continue
        drafts = _take_drafts(queues, sequence) if may_draft else ()
        chunk = BatchChunk(sequence, sequence.computed_tokens, 1 + len(drafts), drafts)
        (with_drafts if drafts else plain).append(chunk)
    # Neighbours of similar context length share one attention call.
    return Decodes(sorted(plain, key=lambda chunk: chunk.start), with_drafts)


def without_yielding(decodes: list[BatchChunk]) -> list[BatchChunk]:
    """Return the decodes of sequences that do not yield to prompts."""
    return [chunk for chunk in decodes if not chunk.sequence.yields]


def _reserve_next_token(queues: RunQueues, sequence: Sequence) -> bool:
    """Reserve the next token of `sequence`, preempting others; False if it was preempted itself."""
    while not queues.blocks.reserve_next_token(sequence):
        if queues.preempt_last() is sequence:
            return False
    return True


def _take_drafts(queues: RunQueues, sequence: Sequence) -> tuple[int, ...]:
    """Return the drafts of `sequence` that have a KV slot, and clear them."""
    drafts, sequence.drafts = sequence.drafts, ()
    slots = queues.blocks.reserve_drafts(sequence, len(drafts), len(queues.running))
    return drafts[:slots]
