"""The corridor of the engine: batch, run, sample, commit, emit. One thread owns all of it.

Rule 1: nothing here waits, locks or asks the time; `worker` turns the crank and carries results.
Rule 2: a sequence that ends, for whatever reason, has given back its blocks before `step` returns.
"""

from dataclasses import dataclass

from torch import Tensor

from nodeagent.engine.decide.batching import Batch, Batching
from nodeagent.engine.decide.sequence import Finish, Sequence
from nodeagent.engine.kv_tiers.mover import Mover
from nodeagent.engine.runner import Runner
from nodeagent.engine.sampling import Sampled, Sampler, UnsoundLogits, sample_rows
from nodeagent.engine.text import StopStrings, TokenText


@dataclass(slots=True, eq=False)
class Generation:
    """A sequence with what turns its logits into tokens and its tokens into text."""

    sequence: Sequence
    sampler: Sampler
    text: TokenText
    stops: StopStrings

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


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step's results."""

    deltas: list[Delta]
    prefill_tokens: int
    decode_tokens: int


class Engine:
    """The generations in this process and the step that moves them all."""

    def __init__(self, runner: Runner, batching: Batching, mover: Mover | None = None) -> None:
        self.batching = batching
        self.mover = mover
        self._runner = runner
        self._generations: dict[int, Generation] = {}
        self.prompt_tokens_total = 0
        self.prefix_hit_tokens_total = 0
        self.output_tokens_total = 0

    @property
    def busy(self) -> bool:
        """True where a step would have work."""
        return self.batching.busy

    def submit(self, generation: Generation) -> None:
        """Queue a generation."""
        self._generations[generation.number] = generation
        self.batching.submit(generation.sequence)

    def cancel(self, number: int) -> None:
        """Drop a generation and free its blocks; one that has ended already is no mistake."""
        generation = self._generations.pop(number, None)
        if generation is not None:
            self.batching.remove(generation.sequence)

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
        """Move every generation that this step's budget reaches; `now_s` is for deadlines."""
        batch = self.batching.next_batch(now_s)
        if self.mover is not None:
            self.mover.move(batch.evicted, batch.restores)
        late = [self._drop(sequence) for sequence in batch.late]
        if not batch.chunks:
            return Stepped(late, 0, 0)
        logits = self._runner.run(batch)
        sampled = self._sample(batch, logits)
        ended = self._commit(batch, sampled)
        deltas = self._emit(sampled, ended)
        return Stepped(late + deltas, batch.prefill_tokens, len(batch.decodes))

    def _drop(self, sequence: Sequence) -> Delta:
        """Tell that `sequence` was given up; its blocks are given back already."""
        del self._generations[sequence.number]
        error = "cannot begin before the deadline: others are served first"
        return Delta(sequence.number, "", None, 0, sequence.cached_tokens, Finish.LATE, error)

    def _sample(
        self, batch: Batch, logits: Tensor
    ) -> list[tuple[Generation, Sampled | UnsoundLogits]]:
        due = [self._generations[c.sequence.number] for c in batch.chunks if c.samples]
        return list(zip(due, sample_rows(logits, [g.sampler for g in due]), strict=True))

    def _commit(
        self, batch: Batch, sampled: list[tuple[Generation, Sampled | UnsoundLogits]]
    ) -> dict[int, Finish]:
        """Book what was computed, append what was sampled; return who ended by that, and why."""
        for chunk in batch.chunks:
            self.batching.computed(chunk)
        ended: dict[int, Finish] = {}
        for generation, result in sampled:
            if generation.sequence.output_tokens == 0:
                self.prompt_tokens_total += generation.sequence.prompt_tokens
                self.prefix_hit_tokens_total += generation.sequence.cached_tokens
            if isinstance(result, UnsoundLogits):
                ended[generation.number] = Finish.ERROR
                # Masked slots are multiplied by zero, and zero times NaN is NaN: what lies in its
                # blocks would spread to who gets them next.
                self._runner.clear(self.batching.blocks.forget(generation.sequence.blocks))
                continue
            finish = generation.sequence.append(result.token)
            if finish is not None:
                ended[generation.number] = finish
        return ended

    def _emit(
        self,
        sampled: list[tuple[Generation, Sampled | UnsoundLogits]],
        ended: dict[int, Finish],
    ) -> list[Delta]:
        deltas: list[Delta] = []
        for generation, result in sampled:
            delta = _delta(generation, result, ended.get(generation.number))
            deltas.append(delta)
            self.output_tokens_total += delta.sampled is not None
            if delta.finish is not None:
                self.cancel(generation.number)
        return deltas


def _delta(generation: Generation, result: Sampled | UnsoundLogits, finish: Finish | None) -> Delta:
    sequence = generation.sequence
    text, sampled, error = "", None, ""
    if isinstance(result, UnsoundLogits):
        error = str(result)
    elif finish is not Finish.STOP:
        sampled = result
        text = generation.stops.feed(generation.text.feed(result.token))
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
    )
