"""Decides the prompt chunks of a step: running prompts continue, then waiting ones are admitted.

When a waiting sequence does not fit, it may preempt a running one of lower priority, unless that
one is earlier in the fair queue: it would be admitted again at once. The first sequence of a tenant
that runs nothing may also preempt the last one of the tenant that runs most. A preempted sequence
finds most of its KV in the prefix cache when it continues.
"""

from collections import Counter
from collections.abc import Container
from operator import itemgetter

from nodeagent.engine.scheduler.batch import BatchChunk
from nodeagent.engine.scheduler.prefill_budget import PrefillBudget
from nodeagent.engine.scheduler.run_queues import RunQueues
from nodeagent.engine.scheduler.sequence import Sequence, queue_order, sequence_count


def continue_prefills(
    queues: RunQueues,
    tokens_max: int,
    admitted: Container[Sequence],
    *,
    skip_yielding: bool,
) -> list[BatchChunk]:
    """Return the next chunks of the running prompts, `tokens_max` tokens in all at most.

    `admitted` are the sequences that this step has admitted: of these only the last token may be
    pending. With `skip_yielding`, sequences that yield get no chunk.

    Tenants share the tokens equally; the part that one does not need goes to the others. The
    prompts of one tenant are computed in queue order.
    """
    by_tenant: dict[bytes, list[Sequence]] = {}
    for sequence in queues.running:
        if skip_yielding and sequence.yields:
            continue
        if sequence in admitted or (sequence.pending_tokens and not sequence.is_decoding):
            by_tenant.setdefault(sequence.scheduling.tenant, []).append(sequence)
    pending = [
        (sum(sequence.pending_tokens for sequence in prompts), prompts)
        for prompts in by_tenant.values()
    ]
    prefills: list[BatchChunk] = []
    for rank, (_, prompts) in enumerate(sorted(pending, key=itemgetter(0))):
        # Rounded up, so that each step makes progress. The tenant that needs least is first.
        share = -(-tokens_max // (len(pending) - rank))
        for sequence in prompts:
            if share:
                tokens = _add_chunk(prefills, sequence, share)
                share, tokens_max = share - tokens, tokens_max - tokens
    return prefills


def prompts_before_decodes(queues: RunQueues, tokens_max: int) -> list[BatchChunk]:
    """Return the prompts that a step computes before it goes on with the decodes, if any.

    Such a prompt is of a tenant that runs nothing else, beside a tenant with more than half of the
    running sequences, whose decodes make each step long. Sequences that yield do not count: steps
    with prompts of others have none of them. Prompts are whole, with at most `tokens_max` tokens in
    all.
    """
    running = Counter(s.scheduling.tenant for s in queues.running if not s.yields)
    ((_, most),) = running.most_common(1) or ((b"", 0),)
    if most < 2 or 2 * most <= running.total():
        return []
    prompts = [
        sequence
        for sequence in queues.running
        if running[sequence.scheduling.tenant] == 1
        and not sequence.yields
        and sequence.pending_tokens
        and not sequence.output_tokens
    ]
    chunks: list[BatchChunk] = []
    for sequence in prompts:
        if sequence.pending_tokens <= tokens_max:
            tokens_max -= _add_chunk(chunks, sequence, tokens_max)
    return chunks


def admit_idle_tenants(
    queues: RunQueues, decodes: list[BatchChunk], prefill_token_s: float
) -> list[Sequence]:
    """Admit the first waiting sequence of each tenant that runs nothing; return those admitted.

    Where it does not fit, it preempts a sequence of the tenant that runs most, whose chunk is
    removed from `decodes`.
    """
    admitted: list[Sequence] = []
    running = queues.running_by_tenant()
    for sequence in list(queues.waiting):
        tenant = sequence.scheduling.tenant
        if running[tenant]:
            continue
        # Its later sequences wait for their turn, also if this one does not fit.
        running[tenant] = 1
        is_admitted = _admit(queues, sequence, prefill_token_s)
        victim = None if is_admitted else _choose_tenant_victim(queues, sequence)
        if victim is not None:
            queues.preempt(victim)
            _remove_chunks(victim, decodes)
            is_admitted = _admit(queues, sequence, prefill_token_s)
        if is_admitted:
            admitted.append(sequence)
    return admitted


def admit_waiting(
    queues: RunQueues,
    decodes: list[BatchChunk],
    prefills: list[BatchChunk],
    tokens_max: int,
    budget: PrefillBudget,
    *,
    skip_yielding: bool,
) -> None:
    """Admit waiting sequences in queue order, and append their first chunks to `prefills`.

    None is admitted to a step that may end with the prompts that it has (`PrefillBudget`). With
    `skip_yielding`, sequences that yield are not admitted.

    `tokens_max` is the remaining part of the step's prompt tokens. The chunks of a sequence that is
    preempted are removed from `decodes` and `prefills`, and their tokens are available again.
    """
    while tokens_max and not _may_end(prefills, len(decodes), budget):
        sequence = next((s for s in queues.waiting if not (skip_yielding and s.yields)), None)
        if sequence is None:
            break
        if _admit(queues, sequence, budget.prefill_token_s):
            tokens_max -= _add_chunk(prefills, sequence, tokens_max)
            continue
        victim = _choose_victim(queues, sequence)
        if victim is None:
            break
        queues.preempt(victim)
        decoded = _remove_chunks(victim, decodes)
        # Decodes that yield to these prompts take none of the step's tokens.
        tokens_max += 0 if skip_yielding and victim.yields else decoded
        tokens_max += _remove_chunks(victim, prefills)


def _may_end(prefills: list[BatchChunk], decodes: int, budget: PrefillBudget) -> bool:
    """Return whether a prompt ends in a step that need not begin another one.

    For the first tokens of sequences that yield no step ends early.
    """
    ends = any(chunk.samples and not chunk.sequence.yields for chunk in prefills)
    return ends and budget.may_end_step(sum(chunk.tokens for chunk in prefills), decodes)


def _admit(queues: RunQueues, sequence: Sequence, prefill_token_s: float) -> bool:
    if queues.free_sequence_slots < sequence_count([sequence]):
        return False
    if not queues.blocks.admit(sequence, prefill_token_s, queues.waiting):
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


def _choose_tenant_victim(queues: RunQueues, sequence: Sequence) -> Sequence | None:
    """Return the last sequence of the tenant that runs most, or None if preempting cannot help."""
    ((tenant, count),) = queues.running_by_tenant().most_common(1) or ((b"", 0),)
    if count < 2:
        return None
    victim = next(s for s in reversed(queues.running) if s.scheduling.tenant == tenant)
    blocks = queues.blocks.pool.free_blocks + queues.blocks.own_blocks(victim)
    slots = queues.free_sequence_slots + sequence_count([victim])
    is_enough = blocks >= sequence.blocks_needed() and slots >= sequence_count([sequence])
    has_lower_priority = sequence.scheduling.priority < victim.scheduling.priority
    return victim if is_enough and not has_lower_priority else None


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
