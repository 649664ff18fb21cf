"""A generation: a sequence with its sampler and detokenizer, and the output of a step for it."""

from dataclasses import dataclass
from typing import Final

from isochrone.wire.kv.kv_sharing import FoundTokens
from nodeagent.engine.core.kv_transfers import OutgoingBlocks
from nodeagent.engine.sampling.sampler import GrammarFailed, InvalidLogits, SampledToken, Sampler
from nodeagent.engine.scheduler.sequence import FinishReason, Sequence
from nodeagent.engine.speculative.speculation import Drafter
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer

NOTHING_FOUND: Final = FoundTokens()


@dataclass(slots=True, eq=False)
class Generation:
    """A sequence, what samples its tokens, and what turns them into text."""

    sequence: Sequence
    sampler: Sampler
    text: StreamDetokenizer
    stops: StopStrings
    drafter: Drafter | None = None
    choice: int = 0
    """The index of this answer among those of its request."""
    forks: "tuple[Generation, ...]" = ()
    """Generations with the same prompt, which this one computes for all."""
    outgoing: OutgoingBlocks | None = None
    """The blocks of its prompt that are sent to another engine."""

    @property
    def number(self) -> int:
        """The number of the sequence."""
        return self.sequence.number


@dataclass(frozen=True, slots=True)
class GenerationDelta:
    """The output of one step for one generation. The last delta has the finish reason."""

    number: int
    text: str
    sampled: SampledToken | None
    output_tokens: int
    cached_tokens: int
    finish: FinishReason | None = None
    error: str = ""
    choice: int = 0
    stop_string: str = ""
    """The client's stop string that ended the text, if one did."""
    found: FoundTokens = NOTHING_FOUND
    """The prompt's tokens that were cached, by tier."""
    began_s: float = 0.0
    """The time of the step that first computed a part of its prompt."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step."""

    deltas: list[GenerationDelta]
    prefill_tokens: int
    decode_tokens: int
    rows: int = 0
    """Tokens computed, rejected drafts included."""


def append_samples(
    generation: Generation, samples: list[SampledToken | InvalidLogits]
) -> list[GenerationDelta]:
    """Append `samples` until one ends the generation; return a delta for each one appended."""
    deltas: list[GenerationDelta] = []
    for sample in samples:
        if isinstance(sample, InvalidLogits):
            is_grammar = isinstance(sample, GrammarFailed)
            finish = FinishReason.INVALID if is_grammar else FinishReason.ERROR
            delta = error_delta(generation, finish, str(sample))
        else:
            delta = _token_delta(generation, sample, generation.sequence.append(sample.token))
        deltas.append(delta)
        if delta.finish is not None:
            break
    return deltas


def error_delta(generation: Generation, finish: FinishReason, error: str) -> GenerationDelta:
    """Return the last delta of a generation that ends with `error`."""
    return _delta(generation, generation.stops.flush(), None, finish, error)


def _token_delta(
    generation: Generation, sample: SampledToken, finish: FinishReason | None
) -> GenerationDelta:
    stops = generation.stops
    text, sampled = "", None
    if finish is not FinishReason.STOP:
        sampled, params = sample, generation.sampler.params
        fed = generation.text.feed(sample.token)
        is_early = generation.sequence.output_tokens <= params.min_tokens
        text = stops.feed(fed, early=is_early)
    if stops.matched:
        finish = FinishReason.STOP
    elif finish is not None:
        text += stops.flush()
    return _delta(generation, text, sampled, finish)


def _delta(
    generation: Generation,
    text: str,
    sampled: SampledToken | None,
    finish: FinishReason | None,
    error: str = "",
) -> GenerationDelta:
    sequence = generation.sequence
    return GenerationDelta(
        number=sequence.number,
        text=text,
        sampled=sampled,
        output_tokens=sequence.output_tokens,
        cached_tokens=sequence.cached_tokens,
        finish=finish,
        error=error,
        choice=generation.choice,
        stop_string=generation.stops.matched,
        found=_found(sequence),
        began_s=sequence.began_s,
    )


def _found(sequence: Sequence) -> FoundTokens:
    """Return where the cached tokens of a prompt were."""
    if not sequence.cached_tokens:
        return NOTHING_FOUND
    file = min(sequence.file_tokens, sequence.restored_tokens)
    return FoundTokens(
        device=sequence.cached_tokens - sequence.restored_tokens,
        host=sequence.restored_tokens - file,
        file=file,
    )
