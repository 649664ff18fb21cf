"""Tokens a second at batch 1, with drafts and without, and what verifying several tokens costs.

    python -m ops.bench.speculate MODEL [--rounds N] [--drafts K] [--kinds tool copy chat]
        [--draft SMALLER] [--clock wall]

Both run in one process on one engine, turn by turn; every output must be the same with and without.
Time is the wall's, or the processor's on one thread, so that neighbours on the machine count little
(`--clock`). `--draft` names a model that drafts beside the lookup. The prompts are committed beside
this file: calls of tools, copies of JSON, and plain chats, which should lose nothing.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.core.step import Computes, Generation
from nodeagent.engine.loading import Loaded, load
from nodeagent.engine.sampling.sampler import Sampler
from nodeagent.engine.scheduler.batching import Batch, Chunk
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS, Ending, Sequence
from nodeagent.engine.server.request_body import ask_of, messages_of, read_chat
from nodeagent.engine.server.tool_calling import Calling
from nodeagent.engine.structured.compiler import Grammars
from nodeagent.engine.tokenizer.detokenizer import StopStrings, TokenText
from nodeagent.engine.tools.chat_tools import tools_of

PROMPTS = Path(__file__).with_name("speculate_prompts.json")
TOKENS_MAX = 120
CONTEXT = 256
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


@dataclass(slots=True)
class Runs:
    """What was measured of one prompt, with drafts and without."""

    tokens: int = 0
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    steps: dict[bool, int] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0

    def rate(self, drafts: bool) -> float:
        """Tokens a second."""
        return self.tokens / median(self.seconds[drafts])


class Bench:
    """One engine and its prompts."""

    def __init__(self, loaded: Loaded, clock: Callable[[], float]) -> None:
        self._loaded = loaded
        self._clock = clock
        speculation = loaded.engine.speculation
        if speculation is not None and speculation.ahead is not None:
            speculation.ahead.clock = clock
        self._grammars = Grammars(loaded.vocabulary)
        self._numbers = 0

    def run(self, prompt: dict[str, Any], runs: Runs, *, drafts: bool) -> str:
        """Answer `prompt` once, timed from its first token on, and return the text."""
        engine, speculation = self._loaded.engine, self._loaded.engine.speculation
        assert speculation is not None
        drafted, accepted = speculation.drafted_tokens_total, speculation.accepted_tokens_total
        engine.submit(self._generation(prompt, drafts=drafts))
        text, tokens, steps = "", 0, 0
        started_s = self._clock()
        while engine.busy:
            before_s = self._clock()
            stepped = engine.step()
            now_s = self._clock()
            engine.timed(stepped, now_s - before_s)
            for delta in stepped.deltas:
                text += delta.text
                tokens = delta.output_tokens
            if stepped.prefill_tokens:
                started_s = now_s
            else:
                steps += 1
        runs.seconds[drafts].append(self._clock() - started_s)
        runs.tokens, runs.steps[drafts] = tokens, steps
        runs.drafted += speculation.drafted_tokens_total - drafted
        runs.accepted += speculation.accepted_tokens_total - accepted
        return text

    def _generation(self, prompt: dict[str, Any], *, drafts: bool) -> Generation:
        loaded = self._loaded
        fields = {key: prompt[key] for key in prompt.keys() - {"name", "kind"}}
        raw = json.dumps({**fields, "temperature": 0, "parallel_tool_calls": False})
        body = read_chat(raw.encode(), 1 << 20)
        assert loaded.template is not None
        tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        text = loaded.template.render(messages_of(body), tools.told if tools else ())
        tokens = loaded.vocabulary.encode(text, special=False)
        ask = ask_of(body)
        calling = Calling.of(tools, loaded.template, loaded.vocabulary)
        grammar = calling.grammar(ask.grammar) if calling else ask.grammar
        constraint = self._grammars.build(grammar) if grammar else None
        self._numbers += 1
        speculation = loaded.engine.speculation
        assert speculation is not None
        return Generation(
            sequence=Sequence(
                self._numbers, tokens, Ending(TOKENS_MAX, loaded.vocabulary.stop_ids)
            ),
            sampler=Sampler(ask.params, [], constraint),
            text=TokenText(loaded.vocabulary),
            stops=StopStrings(()),
            drafter=speculation.drafter(constraint) if drafts else None,
        )


def forward_ms(runner: Computes, rounds: int, clock: Callable[[], float]) -> dict[int, float]:
    """Measure one step that computes so many tokens behind a context, for each of SIZES."""
    sequence = Sequence(0, list(range(CONTEXT + max(SIZES))), Ending(1, frozenset()))
    sequence.blocks = list(range(-(-len(sequence.tokens) // BLOCK_TOKENS)))
    runner.begin(Batch((), (Chunk(sequence, 0, CONTEXT),)))()
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(rounds):
        for size in SIZES:
            chunk = Chunk(sequence, CONTEXT, size)
            batch = Batch((chunk,), ()) if size == 1 else Batch((), (chunk,))
            started_s = clock()
            runner.begin(batch)()
            times[size].append(clock() - started_s)
    return {size: min(found) * 1e3 for size, found in times.items()}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", default=["tool", "copy", "chat"])
    parser.add_argument("--draft", default="", help="a model of the same tokens, or a head")
    parser.add_argument("--clock", default="processor", choices=("processor", "wall"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantisation", default="none", choices=("none", "file"))
    arguments = parser.parse_args()
    loaded = load(
        EngineConfig(
            model_path=str(arguments.model),
            served_name="bench",
            socket="unused",
            threads=arguments.threads,
            draft_path=arguments.draft,
            quantisation=arguments.quantisation,
            draft_tokens_max=arguments.drafts,
        )
    )
    print("| tokens in a step | ms | to one |\n|---|---|---|")
    clock = time.process_time if arguments.clock == "processor" else time.perf_counter
    costs = forward_ms(loaded.engine._runner, 3 * arguments.rounds, clock)
    for size, cost_ms in costs.items():
        print(f"| {size} | {cost_ms:.1f} | {cost_ms / costs[1]:.2f} |")
    print("\n| prompt | tokens | steps | drafts held | tok/s without | with | gain |")
    print("|---|---|---|---|---|---|---|")
    bench = Bench(loaded, clock)
    gains: dict[str, list[float]] = {}
    for prompt in json.loads(PROMPTS.read_text()):
        if prompt["kind"] not in arguments.kinds:
            continue
        runs = Runs()
        for _ in range(arguments.rounds):
            told = {drafts: bench.run(prompt, runs, drafts=drafts) for drafts in (False, True)}
            assert told[True] == told[False], f"{prompt['name']}: {told}"
        gain = runs.rate(True) / runs.rate(False)
        gains.setdefault(prompt["kind"], []).append(gain)
        print(
            f"| {prompt['name']} | {runs.tokens} | {runs.steps[False]} > {runs.steps[True]} |"
            f" {runs.accepted / max(runs.drafted, 1):.0%} | {runs.rate(False):.1f} |"
            f" {runs.rate(True):.1f} | {gain:.2f}x |"
        )
    assert loaded.engine.speculation is not None
    for drafter, tally in loaded.engine.speculation.tallies.items():
        print(f"\n{drafter}: {tally.accepted} of {tally.drafted} drafts held")
    for kind, found in gains.items():
        print(f"\n{kind}: {median(found):.2f}x in the median")


if __name__ == "__main__":
    main()
