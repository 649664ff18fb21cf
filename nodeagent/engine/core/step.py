"""The corridor of the engine: draft, batch, run, sample, commit. One thread owns all of it.

Rule 1: nothing here waits, locks or asks the time; `worker` turns the crank and carries results.
Rule 2: a sequence that ends, for whatever reason, has given back its blocks before `step` returns.
Rule 3: a model of several stages has a batch under way in each. They end in the order in which they
began; what they computed for a sequence that gave back its blocks meanwhile is nobody's.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nodeagent.engine.kvcache.block_mover import Mover
from nodeagent.engine.sampling.sampler import Due, Sampled, Sampler, UnsoundLogits, sample_runs
from nodeagent.engine.scheduler.batching import Batch, Batching
from nodeagent.engine.scheduler.sequence import Finish, Sequence
from nodeagent.engine.speculative.speculation import Drafter, Speculation
from nodeagent.engine.tokenizer.detokenizer import StopStrings, TokenText


class Computes(Protocol):
    """What runs the model: a `Runner`, or the front of several."""

    def begin(self, batch: Batch) -> Callable[[], Tensor]:
        """Begin to compute `batch`; what is returned waits for its logits.

        Several that were begun are waited for in their order.
        """
        ...

    def clear(self, blocks: Ordered[int]) -> None:
        """Zero `blocks`."""
        ...

    def copy(self, pairs: Ordered[tuple[int, int]]) -> None:
        """Copy blocks, each (from, to)."""
        ...


@dataclass(slots=True, eq=False)
class Generation:
    """A sequence with what turns its logits into tokens and its tokens into text."""

    sequence: Sequence
    sampler: Sampler
    text: TokenText
    stops: StopStrings
    drafter: Drafter | None = None
    choice: int = 0
    """Which of its request's answers this is."""
    followers: "tuple[Generation, ...]" = ()
    """Others of the same prompt, which this one computes for all."""

    @property
    def number(self) -> int:
        """The sequence's number."""
        return self.sequence.number


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to one generation. The last one says why it ended."""

    number: int
    text: str
    sampled: Sampled | None
    output_tokens: int
    cached_tokens: int
    finish: Finish | None = None
    error: str = ""
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step's results."""

    deltas: list[Delta]
    prefill_tokens: int
    decode_tokens: int
    rows: int = 0
    """Tokens computed, drafts that did not hold included."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A batch that has begun."""

    batch: Batch
    held: list[list[int]]
    """The blocks of each chunk's sequence, as it began."""
    logits: Callable[[], Tensor]

    def standing(self) -> list[bool]:
        """Say of each chunk whether its sequence still has those blocks."""
        return [
            chunk.sequence.blocks is held
            for chunk, held in zip(self.batch.chunks, self.held, strict=True)
        ]


class Engine:
    """The generations in this process and the step that moves them all."""

    def __init__(
        self,
        runner: Computes,
        batching: Batching,
        mover: Mover | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.batching = batching
        self.mover = mover
        self.speculation = speculation
        self._runner = runner
        self._generations: dict[int, Generation] = {}
        self._underway: deque[Begun] = deque()
        self.prompt_tokens_total = 0
        self.prefix_hit_tokens_total = 0
        self.output_tokens_total = 0

    @property
    def busy(self) -> bool:
        """True where a step would have work."""
        return self.batching.busy or bool(self._underway)

    def submit(self, generation: Generation) -> None:
        """Queue a generation, with it those that follow it."""
        for one in (generation, *generation.followers):
            self._generations[one.number] = one
        generation.sequence.followers = [one.sequence for one in generation.followers]
        self.batching.submit(generation.sequence)

    def cancel(self, number: int) -> None:
        """Drop a generation and free its blocks; one that has ended already is no mistake.

        What follows it still goes with it: nobody would compute its prompt.
        """
        generation = self._generations.pop(number, None)
        if generation is not None:
            self.batching.remove(generation.sequence)
            self._forget_followers(generation.sequence)

    def export_blocks(self, digests: list[bytes]) -> Tensor | None:
        """Return the KV blocks of these digests, wherever they lie; None where one is nowhere."""
        if self.mover is None:
            return None
        return self.mover.export(self.batching.blocks.remembered(), digests)

    def import_blocks(self, digests: list[bytes], contents: Tensor) -> None:
        """Take KV blocks that another engine of the same model computed."""
        if self.mover is not None:
            self.mover.take_in(digests, contents)

    def close(self) -> None:
        """Leave what the device remembers to the next process. After the last step."""
        if self.mover is not None:
            self.mover.close(self.batching.blocks.remembered())

    def step(self, now_s: float = 0.0) -> Stepped:
        """Begin what there is room for, and end what was begun first; `now_s` is for deadlines."""
        late: list[Delta] = []
        while len(self._underway) < self.batching.underway_now:
            if not self._begin(now_s, late):
                break
        if not self._underway:
            return Stepped(late, 0, 0)
        first = self._underway.popleft()
        batch, logits = first.batch, first.logits()
        standing = first.standing()
        sampled = self._sample(batch, standing, logits)
        deltas = self._commit(batch, standing, sampled)
        decoded = len(batch.decodes) if batch.prefills else len(deltas)
        return Stepped(late + deltas, batch.prefill_tokens, decoded, batch.tokens)

    def _begin(self, now_s: float, late: list[Delta]) -> bool:
        """Begin the next batch; False where there is nothing to compute, now."""
        if self.speculation is not None and self.batching.drafting:
            self._draft(self.speculation)
        batch = self.batching.next_batch(now_s)
        if self.mover is not None:
            self.mover.move(batch.evicted, batch.restores, lambda: self._copy(batch))
        else:
            self._copy(batch)
        late += [self._drop(sequence) for sequence in batch.late]
        if not batch.chunks:
            return False
        held = [chunk.sequence.blocks for chunk in batch.chunks]
        self._underway.append(Begun(batch, held, self._runner.begin(batch)))
        self.batching.begun(batch)
        return True

    def _copy(self, batch: Batch) -> None:
        if batch.copies:
            self._runner.copy(batch.copies)

    def _forget_followers(self, sequence: Sequence) -> None:
        for follower in sequence.followers:
            self._generations.pop(follower.number, None)
        sequence.followers = []

    def _draft(self, speculation: Speculation) -> None:
        """Have drafts made; what a model must read for them takes no longer than a prompt may."""
        batching = self.batching
        decoding = [
            (s, self._generations[s.number].drafter) for s in batching.running if s.decoding
        ]
        if not decoding:
            return
        limit = batching.limits.batch_tokens_max
        read_tokens = batching.pace.prompt_tokens(len(decoding), limit)
        speculation.draft(decoding, batching.make_room, read_tokens)

    def timed(self, stepped: Stepped, seconds: float) -> None:
        """Learn what the last step cost."""
        self.batching.underway.note(len(stepped.deltas), seconds)
        if self.speculation is not None:
            self.speculation.timed(stepped.rows, seconds, decodes_only=not stepped.prefill_tokens)

    def _drop(self, sequence: Sequence) -> Delta:
        """Tell that `sequence` was given up; its blocks are given back already."""
        generation = self._generations.pop(sequence.number)
        self._forget_followers(sequence)
        error = "cannot begin before the deadline: others are served first"
        cached = sequence.cached_tokens
        return Delta(
            sequence.number, "", None, 0, cached, Finish.LATE, error, choice=generation.choice
        )

    def _sample(
        self, batch: Batch, standing: list[bool], logits: Tensor
    ) -> dict[int, list[Sampled | UnsoundLogits]]:
        numbers: list[int] = []
        dues: list[Due] = []
        rows: list[int] = []
        at = 0
        for chunk, stands in zip(batch.chunks, standing, strict=True):
            if not chunk.samples:
                continue
            end = at + 1 + len(chunk.drafts)
            # A prompt's last row is every follower's too, and each draws from it for itself.
            for sequence in (chunk.sequence, *chunk.sequence.followers) if stands else ():
                numbers.append(sequence.number)
                dues.append(Due(self._generations[sequence.number].sampler, chunk.drafts))
                rows += range(at, end)
            at = end
        wanted = logits if rows == list(range(len(logits))) else logits[rows]
        return dict(zip(numbers, sample_runs(wanted, dues), strict=True))

    def _commit(
        self,
        batch: Batch,
        standing: list[bool],
        sampled: dict[int, list[Sampled | UnsoundLogits]],
    ) -> list[Delta]:
        """Append what was sampled, book what was computed, let go of who ended."""
        deltas: list[Delta] = []
        for chunk, stands in zip(batch.chunks, standing, strict=True):
            if not stands:
                continue
            sequence = chunk.sequence
            generation = self._generations[sequence.number]
            results = sampled.get(sequence.number, [])
            before = sequence.output_tokens
            if results and before == 0:
                self.prompt_tokens_total += sequence.prompt_tokens
                self.prefix_hit_tokens_total += sequence.cached_tokens
            told = self._append(generation, results)
            held = max(sequence.output_tokens - before - 1, 0)
            self.batching.computed(chunk, refused=len(chunk.drafts) - held)
            if self.speculation is not None and generation.drafter is not None and results:
                self.speculation.settle(generation.drafter, results, len(chunk.drafts))
            # Before the first of them may end and give back what they all go on from.
            forked = self.batching.fork(sequence) if results else []
            deltas += self._settle(generation, told)
            for follower in forked:
                other = self._generations[follower.number]
                deltas += self._settle(other, self._append(other, sampled[follower.number]))
        return deltas

    def _settle(self, generation: Generation, told: list[Delta]) -> list[Delta]:
        """Let go of the generation where what is `told` of it ends it."""
        finish = told[-1].finish if told else None
        if finish is Finish.ERROR:
            # Masked slots are multiplied by zero, and zero times NaN is NaN: what lies in its
            # blocks would spread to who gets them next.
            self._runner.clear(self.batching.blocks.forget(generation.sequence.blocks))
        if finish is not None:
            self.cancel(generation.number)
        return told

    def _append(
        self, generation: Generation, results: list[Sampled | UnsoundLogits]
    ) -> list[Delta]:
        """Append `results` until one ends the generation; return what they add to it."""
        deltas: list[Delta] = []
        for result in results:
            if isinstance(result, UnsoundLogits):
                finish: Finish | None = Finish.ERROR
            else:
                finish = generation.sequence.append(result.token)
            deltas.append(_delta(generation, result, finish))
            self.output_tokens_total += deltas[-1].sampled is not None
            if deltas[-1].finish is not None:
                break
        return deltas


def _delta(generation: Generation, result: Sampled | UnsoundLogits, finish: Finish | None) -> Delta:
    sequence = generation.sequence
    text, sampled, error = "", None, ""
    if isinstance(result, UnsoundLogits):
        error = str(result)
    elif finish is not Finish.STOP:
        sampled, params = result, generation.sampler.params
        early = params.drawn_before + sequence.output_tokens <= params.min_tokens
        text = generation.stops.feed(generation.text.feed(result.token), early=early)
    if generation.stops.matched:
        finish = Finish.STOP
    elif finish is not None:
        text += generation.stops.flush()
    return Delta(
        number=sequence.number,
        text=text,
        sampled=sampled,
        output_tokens=sequence.output_tokens,
        cached_tokens=sequence.cached_tokens,
        finish=finish,
        error=error,
        choice=generation.choice,
    )
