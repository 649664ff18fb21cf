"""Decides the prompt chunks of a step: running prompts continue, then waiting ones are admitted.

When a waiting sequence does not fit, it may preempt a running one of lower priority, unless that
one is earlier in the fair queue: it would be admitted again at once.
"""

from nodeagent.engine.scheduler.batch import BatchChunk
from nodeagent.engine.scheduler.run_queues import RunQueues
from nodeagent.engine.scheduler.sequence import Sequence, queue_order, sequence_count


def continue_prefills(queues: RunQueues, tokens_max: int) -> list[BatchChunk]:
    """Return the next chunks of the running prompts, `tokens_max` tokens in all at most."""
    prefills: list[BatchChunk] = []
    for sequence in queues.running:
        if tokens_max and sequence.pending_tokens and not sequence.is_decoding:
            tokens_max -= _add_chunk(prefills, sequence, tokens_max)
    return prefills


def admit_waiting(
    queues: RunQueues,
    decodes: list[BatchChunk],
    prefills: list[BatchChunk],
    tokens_max: int,
    prefill_token_s: float,
) -> None:
    """Admit waiting sequences in queue order, and append their first chunks to `prefills`.

    `tokens_max` is what is left of the step's prompt tokens. The chunks of a sequence that is
    preempted are removed from `decodes` and `prefills`, and their tokens are available again.
    """
    while tokens_max and queues.waiting:
        sequence = queues.waiting[0]
        if _admit(queues, sequence, prefill_token_s):
            tokens_max -= _add_chunk(prefills, sequence, tokens_max)
            continue
        victim = _choose_victim(queues, sequence)
        if victim is None:
            break
        queues.preempt(victim)
        tokens_max += _remove_chunks(victim, decodes) + _remove_chunks(victim, prefills)


def _admit(queues: RunQueues, sequence: Sequence, prefill_token_s: float) -> bool:
    if queues.free_sequence_slots < sequence_count([sequence]):
        return False
    if not queues.blocks.admit(sequence, prefill_token_s):
        return False
    queues.start(sequence)
    return True


def _choose_victim(queues: RunQueues, sequence: Sequence) -> Sequence | None:
    """Return the running sequence to preempt for `sequence`, or None if preempting cannot help."""
    lower = [
        running
        for running in queues.running
        if running.scheduling.priority < sequence.scheduling.priority
        and queue_order(running) > queue_order(sequence)
    ]
    blocks = queues.blocks.pool.free_blocks + sum(len(running.blocks) for running in lower)
    slots = queues.free_sequence_slots + sequence_count(lower)
    if not lower or blocks < sequence.blocks_needed() or slots < sequence_count([sequence]):
        return None
    return lower[-1]


def _add_chunk(chunks: list[BatchChunk], sequence: Sequence, tokens_max: int) -> int:
    tokens = min(sequence.pending_tokens, tokens_max)
    chunks.append(BatchChunk(sequence, sequence.computed_tokens, tokens))
    return tokens


def _remove_chunks(sequence: Sequence, chunks: list[BatchChunk]) -> int:
    """Remove the chunks of `sequence` from `chunks`; return their tokens."""
    removed = [chunk for chunk in chunks if chunk.sequence is sequence]
    for chunk in removed:
        chunks.remove(chunk)
    return sum(chunk.tokens for chunk in removed)
