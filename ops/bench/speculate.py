"""Tokens per second at batch 1 with and without drafts, and the cost of verifying several tokens.

    python -m ops.bench.speculate MODEL [--rounds N] [--drafts K] [--kinds tool copy chat]
        [--draft SMALLER] [--clock wall]

Both run in one process on one engine, in alternating rounds, and must give the same output.
`--clock` selects wall time, or processor time on one thread, which other load on the machine hardly
affects. `--draft` names a draft model. The prompts are beside this file: tool calls, copies of
JSON, and plain chats, which should not become slower.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.core.generation import Generation
from nodeagent.engine.core.step import ModelExecutor
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.loading import LoadedEngine, load_engine
from nodeagent.engine.sampling.sampler import Sampler
from nodeagent.engine.scheduler.batch import Batch, BatchChunk
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.server.openai.generation_options import generation_options
from nodeagent.engine.server.openai.request_body import (
    read_chat,
    template_messages,
)
from nodeagent.engine.server.openai.tool_fields import requested_tools
from nodeagent.engine.server.openai.tool_use import ToolUse
from nodeagent.engine.structured.compiler import GrammarCompiler
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer

PROMPTS = Path(__file__).with_name("speculate_prompts.json")
TOKENS_MAX = 120
CONTEXT = 256
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


@dataclass(slots=True)
class PromptRuns:
    """The measurements of one prompt, with and without drafts."""

    tokens: int = 0
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    steps: dict[bool, int] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0

    def rate(self, drafts: bool) -> float:
        """Return tokens per second."""
        return self.tokens / median(self.seconds[drafts])


class SpeculationBench:
    """One engine and its prompts."""

    def __init__(self, loaded: LoadedEngine, clock: Callable[[], float]) -> None:
        self._loaded = loaded
        self._clock = clock
        speculation = loaded.engine.speculation
        if speculation is not None and speculation.model is not None:
            speculation.model.clock = clock
        self._grammars = GrammarCompiler(loaded.vocabulary)
        self._numbers = 0

    def run(self, prompt: dict[str, Any], runs: PromptRuns, *, drafts: bool) -> str:
        """Answer `prompt` once, timed from its first token, and return the text."""
        engine, speculation = self._loaded.engine, self._loaded.engine.speculation
        assert speculation is not None
        drafted, accepted = speculation.drafted_tokens_total, speculation.accepted_tokens_total
        engine.submit(self._generation(prompt, drafts=drafts))
        text, tokens, steps = "", 0, 0
        started_s = self._clock()
        while engine.has_work:
            before_s = self._clock()
            output = engine.step()
            now_s = self._clock()
            engine.record_timing(output, now_s - before_s)
            for delta in output.deltas:
                text += delta.text
                tokens = delta.output_tokens
            if output.prefill_tokens:
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
        tools = requested_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        text = loaded.template.render(template_messages(body), tools.described if tools else ())
        tokens = loaded.vocabulary.encode(text, special=False)
        options = generation_options(body)
        tool_use = ToolUse.of(tools, loaded.template, loaded.vocabulary)
        grammar = tool_use.grammar(options.grammar) if tool_use else options.grammar
        constraint = self._grammars.compile_now(grammar) if grammar else None
        self._numbers += 1
        speculation = loaded.engine.speculation
        assert speculation is not None
        return Generation(
            sequence=Sequence(
                self._numbers, tokens, StopConditions(TOKENS_MAX, loaded.vocabulary.stop_ids)
            ),
            sampler=Sampler(options.params, [], constraint),
            text=StreamDetokenizer(loaded.vocabulary),
            stops=StopStrings(()),
            drafter=speculation.drafter(constraint) if drafts else None,
        )


def forward_ms(runner: ModelExecutor, rounds: int, clock: Callable[[], float]) -> dict[int, float]:
    """Measure a step that computes so many tokens after a context, for each of SIZES."""
    sequence = Sequence(0, list(range(CONTEXT + max(SIZES))), StopConditions(1, frozenset()))
    sequence.blocks = list(range(-(-len(sequence.tokens) // BLOCK_TOKENS)))
    runner.begin(Batch((), (BatchChunk(sequence, 0, CONTEXT),)))()
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(rounds):
        for size in SIZES:
            chunk = BatchChunk(sequence, CONTEXT, size)
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
    parser.add_argument("--draft", default="", help="draft model or EAGLE-3 head")
    parser.add_argument("--clock", default="processor", choices=("processor", "wall"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantisation", default="none", choices=("none", "file"))
    arguments = parser.parse_args()
    loaded = load_engine(
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
    print("| tokens in a step | ms | relative to one |\n|---|---|---|")
    clock = time.process_time if arguments.clock == "processor" else time.perf_counter
    costs = forward_ms(loaded.engine._executor, 3 * arguments.rounds, clock)
    for size, cost_ms in costs.items():
        print(f"| {size} | {cost_ms:.1f} | {cost_ms / costs[1]:.2f} |")
    print("\n| prompt | tokens | steps | drafts accepted | tok/s without | with | gain |")
    print("|---|---|---|---|---|---|---|")
    bench = SpeculationBench(loaded, clock)
    gains: dict[str, list[float]] = {}
    for prompt in json.loads(PROMPTS.read_text()):
        if prompt["kind"] not in arguments.kinds:
            continue
        runs = PromptRuns()
        for _ in range(arguments.rounds):
            texts = {drafts: bench.run(prompt, runs, drafts=drafts) for drafts in (False, True)}
            assert texts[True] == texts[False], f"{prompt['name']}: {texts}"
        gain = runs.rate(True) / runs.rate(False)
        gains.setdefault(prompt["kind"], []).append(gain)
        print(
            f"| {prompt['name']} | {runs.tokens} | {runs.steps[False]} > {runs.steps[True]} |"
            f" {runs.accepted / max(runs.drafted, 1):.0%} | {runs.rate(False):.1f} |"
            f" {runs.rate(True):.1f} | {gain:.2f}x |"
        )
    assert loaded.engine.speculation is not None
    for kind, counts in loaded.engine.speculation.counts_by_kind.items():
        print(f"\n{kind}: {counts.accepted} of {counts.drafted} drafts accepted")
    for kind, found in gains.items():
        print(f"\n{kind}: {median(found):.2f}x in the median")


if __name__ == "__main__":
    main()
