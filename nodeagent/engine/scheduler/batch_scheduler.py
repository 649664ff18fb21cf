"""Continuous batching: decodes first, then prompt chunks in the remaining tokens of the step.

Rule 1: a step computes at most `batch_tokens_max` tokens. That exceeds `sequences_max`, so that
every decoding sequence fits into every step, and some prompt tokens do too. Beside decodes, prompts
get no more tokens than `PrefillBudget` allows, so that the next tokens are not delayed. A step in
which a prompt ends admits no further one if its prompts take long already: their first tokens would
wait for it.
Rule 2: sequences are served in the order of the fair queue (`VirtualClock`, `queue_order`). But a
tenant that runs nothing is admitted first, if necessary by preempting a sequence of the tenant that
runs most. Tenants share the prompt tokens of a step.
Beside a tenant with more than half of what runs, the short prompt of a tenant that runs nothing
else gets a step without decodes, but never two such steps in a row. For SHORT_STEPS_S afterwards
the other's prompts are computed in short steps, because the next small prompt has to wait for one.
Rule 3: a sequence whose deadline passes before its first token is dropped. Within a tenant the
sequence whose first token is due first is served first.
Rule 4: a step verifies drafts only if no prompt waits and enough blocks are free.
Rule 5: a request with several answers is admitted as a whole: its first sequence computes the
prompt, and the slots of its forks are reserved until they start.
Rule 6: sequences of the lowest priority (items of batches) take no part in a step that computes
prompts of others, and steps that compute only their prompts are short: the next prompt of others
has to wait for one, unless it can interrupt it (rule 4 of `core/step.py`).
Rule 7: with several batches in flight each has an even part of the decodes. Batches are computed in
the order in which they began, so that KV counts as computed for every batch that begins later: the
next chunk of a prompt need not wait for the one before.

`decode.py` decides the decodes; `prefill.py` decides the prompt chunks, and which sequence is
preempted for a waiting one.
"""

from collections.abc import Container, Sized
from typing import Final

from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS, BlockPool
from nodeagent.engine.kvcache.swap_or_recompute import SwapOrRecompute
from nodeagent.engine.scheduler.batch import Batch, BatchChunk, StepLimits
from nodeagent.engine.scheduler.decode import schedule_decodes, without_yielding
from nodeagent.engine.scheduler.fair_queue import VirtualClock
from nodeagent.engine.scheduler.pipeline_depth import PipelineDepth
from nodeagent.engine.scheduler.prefill import (
    admit_idle_tenants,
    admit_waiting,
    continue_prefills,
    prompts_before_decodes,
)
from nodeagent.engine.scheduler.prefill_budget import SHORT_STEP_SHARE, PrefillBudget
from nodeagent.engine.scheduler.run_queues import RunQueues
from nodeagent.engine.scheduler.sequence import Sequence
from nodeagent.engine.scheduler.sequence_blocks import SequenceBlocks

SHORT_STEPS_S: Final = 10.0
"""How long steps stay short after a small tenant's prompt: until its next one, if it is active."""


class BatchScheduler:
    """Decides each step of the engine from the sequences that wait and run."""

    def __init__(
        self,
        limits: StepLimits,
        pool: BlockPool,
        prefill_budget: PrefillBudget | None = None,
        pipeline_depth: PipelineDepth | None = None,
        lower_tiers: Container[bytes] = frozenset(),
        swap_or_recompute: SwapOrRecompute | None = None,
    ) -> None:
        """Schedule over the blocks of `pool`.

        `lower_tiers` contains the digests of the blocks in the tiers below the device.
        """
        self.limits = limits
        self.pool = pool
        self.blocks = SequenceBlocks(pool, lower_tiers, swap_or_recompute)
        self.virtual_clock = VirtualClock()
        self.queues = RunQueues(self.blocks, limits.sequences_max, self.virtual_clock)
        self.prefill_budget = prefill_budget or PrefillBudget(float("inf"))
        self.pipeline_depth = pipeline_depth or PipelineDepth()
        self.favours_small_tenants = True
        """False only in benchmarks, to measure what rule 2 does for tenants that run little."""
        self._has_deferred_decodes = False
        """Whether the last step computed prompts before the decodes that could have run."""
        self._short_steps_until_s = float("-inf")

    @property
    def waiting(self) -> list[Sequence]:
        """The sequences that wait, in queue order."""
        return self.queues.waiting

    @property
    def running(self) -> list[Sequence]:
        """The sequences that run, in queue order."""
        return self.queues.running

    @property
    def has_work(self) -> bool:
        """True if any sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def sequence_tokens_max(self) -> int:
        """The longest sequence that fits into all KV blocks."""
        return self.pool.total * BLOCK_TOKENS

    @property
    def may_draft(self) -> bool:
        """True if the next step may verify drafts: no prompt waits or is being computed."""
        return not self.waiting and self.queues.decoding_count == len(self.running)

    @property
    def batches_in_flight_max(self) -> int:
        """How many batches may be in flight now."""
        if self.pipeline_depth.stages == 1:
            return 1
        has_prompts = bool(self.waiting) or any(s.pending_tokens > 1 for s in self.running)
        return self.pipeline_depth.choose(self.queues.decoding_count, has_prompts=has_prompts)

    def submit(self, sequence: Sequence) -> None:
        """Queue `sequence`. The caller enforces `sequence_tokens_max` and bounds the queue."""
        sequence.virtual_start = self.virtual_clock.assign_start(
            sequence.scheduling,
            sequence.prompt_tokens,
            sequence.stop_conditions.tokens_max,
            1 + len(sequence.forks),
        )
        self.blocks.touch_prefix(sequence)
        self.queues.enqueue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled `sequence` and release its blocks."""
        self.queues.remove(sequence)

    def next_batch(self, now_s: float = 0.0) -> Batch:
        """Decide the next step. `now_s` is the time that deadlines are compared with."""
        late = self.queues.remove_late(now_s)
        self.queues.exchange_by_due(now_s)
        preemptions = self.queues.preemptions
        decodes, verifies = schedule_decodes(
            self.queues, self._decodes_per_batch(), may_draft=self.may_draft
        )
        token_s = self.prefill_budget.prefill_token_s
        # A sequence that the decodes just preempted would be admitted only to be preempted again.
        has_memory = self.queues.preemptions == preemptions
        admitted = admit_idle_tenants(self.queues, decodes, token_s) if has_memory else []
        first = self._prompts_before_decodes(decodes)
        if first:
            decodes, verifies = [], []
            self._short_steps_until_s = now_s + SHORT_STEPS_S
        prefills = first
        has_yielding = any(sequence.yields for sequence in (*self.running, *self.waiting))
        if has_yielding and not first:
            tokens = self._prompt_tokens(without_yielding(decodes), now_s)
            prefills = self._prompts(
                tokens, decodes, admitted, may_admit=has_memory, skip_yielding=True
            )
            if prefills:
                decodes, verifies = without_yielding(decodes), without_yielding(verifies)
        if not prefills:
            tokens = self._prompt_tokens(decodes, now_s, is_short=has_yielding)
            prefills = self._prompts(tokens, decodes, admitted, may_admit=has_memory)
        moves = self.blocks.take_moves()
        return Batch(
            decodes=tuple(decodes),
            prefills=tuple(prefills),
            late=late,
            evicted=moves.evicted,
            copies=moves.copies,
            restores=moves.restores,
            verifies=tuple(verifies),
        )

    def mark_begun(self, batch: Batch) -> None:
        """Record that `batch` is in flight: batches that begin later see its KV, but no drafts."""
        for chunk in batch.chunks:
            chunk.sequence.computed_tokens = chunk.start + chunk.tokens - len(chunk.drafts)

    def mark_computed(self, chunk: BatchChunk, rejected_drafts: int = 0) -> None:
        """Record that `chunk` has run, and publish its full blocks to the prefix cache.

        The KV of the last `rejected_drafts` tokens is invalid, and will be overwritten.
        """
        sequence, end = chunk.sequence, chunk.start + chunk.tokens - rejected_drafts
        # A later chunk of the sequence may have begun already.
        sequence.computed_tokens = max(sequence.computed_tokens, end)
        self.blocks.publish(sequence, end)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Start the forks of `sequence`, whose prompt was just computed; return them."""
        forks, sequence.forks = sequence.forks, []
        for fork in forks:
            fork.virtual_start = sequence.virtual_start
            self.blocks.share(sequence, fork)
            self.queues.start_fork(fork)
        return forks

    def reserve_drafts(self, sequence: Sequence, drafts: int) -> int:
        """Allocate blocks for `drafts` draft tokens if many are free; return how many fit."""
        return self.blocks.reserve_drafts(sequence, drafts, len(self.running))

    def _prompt_tokens(self, decodes: Sized, now_s: float, *, is_short: bool = False) -> int:
        """Return how many prompt tokens a step with these decodes may compute."""
        tokens_max = self.limits.batch_tokens_max - len(decodes)
        if is_short:
            tokens_max = self.prefill_budget.prompt_tokens_alone(tokens_max, SHORT_STEP_SHARE)
        return self.prefill_budget.prompt_tokens_allowed(
            len(decodes),
            tokens_max,
            short_step_of=(
                self.queues.pending_prompt_tokens if now_s < self._short_steps_until_s else None
            ),
        )

    def _prompts(
        self,
        tokens: int,
        decodes: list[BatchChunk],
        admitted: Container[Sequence],
        *,
        may_admit: bool,
        skip_yielding: bool = False,
    ) -> list[BatchChunk]:
        """Return the prompt chunks of a step, `tokens` tokens in all at most.

        With `skip_yielding` they are only of sequences that do not yield. The chunks of sequences
        that are preempted for them are removed from `decodes`.
        """
        prefills = continue_prefills(self.queues, tokens, admitted, skip_yielding=skip_yielding)
        if may_admit:
            tokens -= sum(chunk.tokens for chunk in prefills)
            budget = self.prefill_budget
            admit_waiting(
                self.queues, decodes, prefills, tokens, budget, skip_yielding=skip_yielding
            )
        return prefills

    def _prompts_before_decodes(self, decodes: Sized) -> list[BatchChunk]:
        """Return the prompts that go before `decodes`; none if the last step had such prompts."""
        first: list[BatchChunk] = []
        if decodes and self.favours_small_tenants and not self._has_deferred_decodes:
            tokens_max = self.prefill_budget.prompt_tokens_alone(self.limits.batch_tokens_max)
            first = prompts_before_decodes(self.queues, tokens_max)
        self._has_deferred_decodes = bool(first)
        return first

    def _decodes_per_batch(self) -> int:
        batches = self.batches_in_flight_max
        return len(self.running) if batches == 1 else -(-self.queues.decoding_count // batches)
