"""The main path of the engine: draft, schedule, move KV blocks, run, sample, commit.

Rule 1: a step does not read the time. `GenerationThread` calls it and passes the results on; one
thread owns all of it, but other threads may call `kv_transfers` while the model computes: inside
`computing`, a step touches no KV bookkeeping.
Rule 2: a sequence that ends, for whatever reason, has released its blocks before `step` returns.
Rule 3: a model with several pipeline stages has a batch in flight in each. Batches finish in the
order in which they began. Results for a sequence that lost its blocks meanwhile are discarded.
Rule 4: a client's request interrupts a step that computes sequences of the lowest priority, unless
the step computes another client's prompt. An interrupted step is computed again. The step after it
runs to its end, so that the lowest priority makes progress too.
"""

from collections import abc, deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from nodeagent.engine.core.generation import (
    Generation,
    GenerationDelta,
    StepOutput,
    append_samples,
    error_delta,
)
from nodeagent.engine.core.kv_transfers import KvTransfers
from nodeagent.engine.kernels.step_interrupt import StepInterrupt, StepInterrupted
from nodeagent.engine.kvcache.block_mover import BlockMover, DeviceBlocks
from nodeagent.engine.kvcache.block_pool import CachedBlock
from nodeagent.engine.sampling.sampler import InvalidLogits, SampledToken, SamplingRun, sample_step
from nodeagent.engine.scheduler.batch import Batch, BatchChunk, BlockCopy
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.sequence import FinishReason, Sequence
from nodeagent.engine.speculative.speculation import Speculation

_Samples = dict[int, list[SampledToken | InvalidLogits]]
"""The sampled tokens, by the number of the sequence."""


class ModelExecutor(Protocol):
    """Runs the model: a runner in this process, or rank 0 of several."""

    def begin(
        self, batch: Batch, interrupt: StepInterrupt | None = None
    ) -> abc.Callable[[], Tensor]:
        """Begin to compute `batch`; return a function that waits for its logits.

        With several batches in flight their logits are waited for in the order of `begin`. May
        raise StepInterrupted once `interrupt` is set.
        """
        ...

    def clear(self, blocks: abc.Sequence[int]) -> None:
        """Zero `blocks`."""
        ...

    def copy(self, copies: abc.Sequence[BlockCopy]) -> None:
        """Copy blocks on the device."""
        ...


class WakenedExecutor(ModelExecutor, DeviceBlocks, Protocol):
    """A model in this process, with its KV blocks."""


class SleepingExecutor:
    """Stands in for the model of an engine that sleeps: it has none, and no KV."""

    can_copy_beside_steps = False

    def begin(
        self, batch: Batch, interrupt: StepInterrupt | None = None
    ) -> abc.Callable[[], Tensor]:
        """Raise RuntimeError: a generation must wake the engine first."""
        raise RuntimeError("cannot run a step: the engine sleeps")

    def clear(self, blocks: abc.Sequence[int]) -> None:
        """Do nothing: there are no blocks."""

    def copy(self, copies: abc.Sequence[BlockCopy]) -> None:
        """Do nothing: there are no blocks."""

    def read_blocks(self, blocks: abc.Sequence[int], out: Tensor | None = None) -> Tensor:
        """Raise RuntimeError: there are no blocks."""
        raise RuntimeError("cannot read KV: the engine sleeps")

    def write_blocks(self, blocks: abc.Sequence[int], contents: Tensor) -> None:
        """Raise RuntimeError: there are no blocks."""
        raise RuntimeError("cannot write KV: the engine sleeps")


class DroppedModel(NamedTuple):
    """The model of an engine that falls asleep, and the cached blocks that are worth keeping."""

    executor: ModelExecutor
    kept: abc.Sequence[CachedBlock]


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """A batch that the executor has begun."""

    batch: Batch
    blocks: list[list[int]]
    """The block list of each chunk's sequence when the batch began."""
    wait_logits: abc.Callable[[], Tensor]

    def valid_chunks(self) -> list[BatchChunk]:
        """Return the chunks whose sequences still have the blocks that the batch wrote to."""
        return [
            chunk
            for chunk, blocks in zip(self.batch.chunks, self.blocks, strict=True)
            if chunk.sequence.blocks is blocks
        ]


class EngineCore:
    """The generations in this process and the step that advances them all."""

    def __init__(
        self,
        executor: WakenedExecutor,
        scheduler: BatchScheduler,
        block_mover: BlockMover | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.block_mover = block_mover
        self.kv_transfers = KvTransfers(scheduler.pool, executor, block_mover)
        self.speculation = speculation
        self._executor = executor
        self._generations: dict[int, Generation] = {}
        self._in_flight: deque[InFlightBatch] = deque()
        self.interrupt = StepInterrupt()
        """Set by any thread that has something more urgent than the lowest priority."""
        self.computing: abc.Callable[[], AbstractContextManager[None]] = nullcontext
        """Returns the context in which the model computes."""
        self._was_interrupted = False
        self.prompt_tokens_total = 0
        self.prefix_hit_tokens_total = 0
        self.output_tokens_total = 0

    @property
    def has_work(self) -> bool:
        """True if a step would have something to do."""
        return self.scheduler.has_work or bool(self._in_flight)

    def submit(self, generation: Generation) -> None:
        """Queue a generation and its forks."""
        for submitted in (generation, *generation.forks):
            self._generations[submitted.number] = submitted
        if generation.outgoing is not None:
            self.kv_transfers.open_outgoing(generation.number, generation.outgoing)
        generation.sequence.forks = [fork.sequence for fork in generation.forks]
        self.scheduler.submit(generation.sequence)

    def cancel(self, number: int) -> None:
        """Drop a generation and release its blocks; does nothing if it has ended.

        Forks that have not started are dropped too, because nothing else computes their prompt.
        """
        generation = self._generations.pop(number, None)
        if generation is not None:
            self.scheduler.remove(generation.sequence)
            self._forget_forks(generation.sequence)

    def import_blocks(self, digests: list[bytes], contents: Tensor) -> None:
        """Store KV blocks that another engine with the same model computed."""
        if self.block_mover is not None:
            self.block_mover.import_blocks(digests, contents)

    def fall_asleep(self, save_until_s: float, kept_max: int) -> "DroppedModel | None":
        """Drop the model and its KV; cached blocks go to the tiers below, if there are any.

        Return the model, which nothing else holds then, and up to `kept_max` blocks that the caller
        may keep for the wake. Return None, and change nothing, if a generation or a transfer has
        blocks. Blocks not saved by `save_until_s` are dropped.
        """
        pool = self.scheduler.pool
        if self.has_work or pool.used_blocks:
            return None
        if self.block_mover is not None:
            self.block_mover.save_all(pool.cached_blocks(), save_until_s)
        kept = pool.found_blocks(kept_max)
        pool.forget_cached()
        executor = self._executor
        self._use_executor(SleepingExecutor())
        self.kv_transfers.fall_asleep()
        return DroppedModel(executor, kept)

    def wake_up(self, executor: "WakenedExecutor", kept: abc.Sequence[CachedBlock] = ()) -> None:
        """Go on with a model that was loaded again, with as many KV blocks as before.

        The model has the contents of the blocks `kept`.
        """
        self._use_executor(executor)
        self.scheduler.pool.restore(kept)

    def _use_executor(self, executor: "WakenedExecutor") -> None:
        self._executor = executor
        self.kv_transfers.use_device(executor)
        if self.block_mover is not None:
            self.block_mover.use_device(executor)

    def close(self) -> None:
        """Save the prefix cache of the device for the next process. Call after the last step."""
        if self.block_mover is not None:
            self.block_mover.close(self.scheduler.pool.cached_blocks())

    def step(self, now_s: float = 0.0) -> StepOutput:
        """Begin batches up to the pipeline's depth, then finish the oldest one in flight.

        Deadlines are compared with `now_s`.
        """
        late = self._begin_batches(now_s)
        if not self._in_flight:
            return StepOutput(late, 0, 0)
        in_flight = self._in_flight.popleft()
        batch = in_flight.batch
        with self.computing():
            logits = in_flight.wait_logits()
        chunks = in_flight.valid_chunks()
        samples = self._sample(batch, chunks, logits)
        deltas = self._commit(chunks, samples)
        # Without prompts every delta is a decoded token, accepted drafts included.
        decode_tokens = len(batch.decodes) if batch.prefills else len(deltas)
        return StepOutput(late + deltas, batch.prefill_tokens, decode_tokens, batch.tokens)

    def record_timing(self, output: StepOutput, seconds: float) -> None:
        """Tell the pipeline depth and the speculation how long the last step took."""
        self.scheduler.pipeline_depth.record_step(len(output.deltas), seconds)
        if self.speculation is not None:
            self.speculation.record_step(
                output.rows, seconds, decodes_only=not output.prefill_tokens
            )

    def _begin_batches(self, now_s: float) -> list[GenerationDelta]:
        """Begin batches until enough are in flight, or nothing is left to compute now.

        Returns the deltas of the sequences that missed their deadlines.
        """
        late: list[GenerationDelta] = []
        while len(self._in_flight) < self.scheduler.batches_in_flight_max:
            self._draft()
            batch = self.scheduler.next_batch(now_s)
            self._move_blocks(batch)
            late += [self._drop_late(sequence) for sequence in batch.late]
            if not batch.chunks:
                if self._can_free_blocks():
                    continue
                break
            wait_logits = self._begin(batch)
            if wait_logits is None:
                break
            blocks = [chunk.sequence.blocks for chunk in batch.chunks]
            self._in_flight.append(InFlightBatch(batch, blocks, wait_logits))
            self.scheduler.mark_begun(batch)
            for chunk in batch.prefills:
                chunk.sequence.began_s = chunk.sequence.began_s or now_s
        return late

    def _can_free_blocks(self) -> bool:
        """Free blocks that transfers hold, if nothing runs: then no sequence will free any."""
        if self._in_flight or self.scheduler.running or not self.scheduler.waiting:
            return False
        return self.kv_transfers.let_go_of_prefix()

    def _begin(self, batch: Batch) -> abc.Callable[[], Tensor] | None:
        """Begin to compute `batch`; return None if a more urgent request interrupted it."""
        # A draft model has recorded more of the sequences than would be computed.
        has_model = self.speculation is not None and self.speculation.model is not None
        if self._was_interrupted or has_model or not batch.may_be_interrupted:
            self._was_interrupted = False
            with self.computing():
                return self._executor.begin(batch)
        try:
            with self.computing():
                return self._executor.begin(batch, self.interrupt)
        except StepInterrupted:
            self._was_interrupted = True
            return None

    def _draft(self) -> None:
        """Have drafts made for the next step, if it may verify any."""
        scheduler = self.scheduler
        if self.speculation is None or not scheduler.may_draft:
            return
        decoding = [
            (sequence, self._generations[sequence.number].drafter)
            for sequence in scheduler.running
            if sequence.is_decoding
        ]
        if not decoding:
            return
        # A draft model may read as many tokens as a prompt may compute beside decodes.
        read_tokens = scheduler.prefill_budget.prompt_tokens_allowed(
            len(decoding), scheduler.limits.batch_tokens_max
        )
        self.speculation.draft(decoding, scheduler.reserve_drafts, read_tokens)

    def _move_blocks(self, batch: Batch) -> None:
        """Move the KV blocks of `batch` between the device and the tiers below it."""

        def copy_on_device() -> None:
            if batch.copies:
                self._executor.copy(batch.copies)

        if self.block_mover is not None:
            self.block_mover.move(batch.evicted, batch.restores, copy_on_device)
        else:
            copy_on_device()

    def _drop_late(self, sequence: Sequence) -> GenerationDelta:
        """Forget a sequence that missed its deadline; the scheduler has released its blocks."""
        generation = self._generations.pop(sequence.number)
        self._forget_forks(sequence)
        error = "cannot begin before the deadline: other requests are served first"
        return error_delta(generation, FinishReason.LATE, error)

    def _forget_forks(self, sequence: Sequence) -> None:
        for fork in sequence.forks:
            self._generations.pop(fork.number, None)
        sequence.forks = []

    def _sample(self, batch: Batch, valid: list[BatchChunk], logits: Tensor) -> _Samples:
        """Sample for the `valid` chunks of `batch`, and for the forks of their sequences.

        `logits` has a row for each chunk that samples, preceded by one for each of its drafts.
        """
        numbers: list[int] = []
        due: list[SamplingRun] = []
        rows: list[int] = []
        row = 0
        valid_chunks = set(valid)
        for chunk in batch.chunks:
            if not chunk.samples:
                continue
            end = row + 1 + len(chunk.drafts)
            if chunk in valid_chunks:
                # Forks sample their first token from the same row, each with its own sampler.
                for sequence in (chunk.sequence, *chunk.sequence.forks):
                    numbers.append(sequence.number)
                    due.append(
                        SamplingRun(self._generations[sequence.number].sampler, chunk.drafts)
                    )
                    rows += range(row, end)
            row = end
        needed = logits if rows == list(range(len(logits))) else logits[rows]
        return dict(zip(numbers, sample_step(needed, due), strict=True))

    def _commit(self, chunks: list[BatchChunk], samples: _Samples) -> list[GenerationDelta]:
        """Append the samples, record what was computed, and release what has ended."""
        deltas: list[GenerationDelta] = []
        for chunk in chunks:
            sequence = chunk.sequence
            generation = self._generations[sequence.number]
            sampled = samples.get(sequence.number, [])
            output_before = sequence.output_tokens
            if sampled and output_before == 0:
                self.prompt_tokens_total += sequence.prompt_tokens
                self.prefix_hit_tokens_total += sequence.cached_tokens
            added = append_samples(generation, sampled)
            accepted = max(sequence.output_tokens - output_before - 1, 0)
            self.scheduler.mark_computed(chunk, rejected_drafts=len(chunk.drafts) - accepted)
            if generation.outgoing is not None:
                self.kv_transfers.hold_computed(sequence)
            if self.speculation is not None and generation.drafter is not None and sampled:
                self.speculation.record_results(generation.drafter, sampled, len(chunk.drafts))
            # Before the first of them may end and release the blocks that the forks start from.
            forks = self.scheduler.fork(sequence) if sampled else []
            deltas += self._emit(generation, added)
            for fork in forks:
                forked = self._generations[fork.number]
                deltas += self._emit(forked, append_samples(forked, samples[fork.number]))
        return deltas

    def _emit(self, generation: Generation, deltas: list[GenerationDelta]) -> list[GenerationDelta]:
        """Count and return the `deltas` of a generation, and release it if they end it."""
        self.output_tokens_total += sum(delta.sampled is not None for delta in deltas)
        finish = deltas[-1].finish if deltas else None
        if finish is FinishReason.ERROR:
            # Masked slots are multiplied by zero, and zero times NaN is NaN: the contents of its
            # blocks would spread to the sequences that get them next.
            failed = frozenset(generation.sequence.blocks)
            self.kv_transfers.let_go_of(generation.number, failed)
            blocks = self.scheduler.pool.uncache(generation.sequence.blocks)
            self._executor.clear(blocks)
        if finish is not None:
            self.cancel(generation.number)
        return deltas
