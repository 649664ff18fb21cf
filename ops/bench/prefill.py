"""Compares how fast engines read prompts, alternating, in one thread's processor seconds.

    python -m ops.bench.prefill FOLDER [--gguf MODEL.gguf] [--tokens 256 1024 4096]
        [--made-up-millions 783] [--vendor-python .engines/vllm/bin/python] [--rounds 3]

FOLDER is a safetensors model in bf16. transformers reads it in bf16, ours reads it exactly
(`none`), rounded to 14 bits (`file`) and in bytes (`int8`), and the GGUF file packed, with and
without bytes.
With `--made-up-millions` the model is made up in a temporary folder: random weights, with the
vocabulary of the GGUF file. Each engine has one thread and reports its own processor time, which
other load changes little; each figure is the best of the rounds.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Final

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.weights.checkpoint import open_checkpoint
from ops.bench.engine import VOCABULARY, ContestantProcess, start
from ops.bench.engine_made_up import write_made_up

VENDOR: Final = "transformers-bf16"


def prefill_gflop(shape: DecoderShape, tokens: int) -> float:
    """Return the operations of a prompt: products, the head for one row, and causal attention."""
    head = shape.vocabulary * shape.hidden
    embeddings = head if shape.tied_embeddings else 2 * head
    products = 2 * (tokens * (shape.parameters() - embeddings) + head)
    attention = 2 * tokens * tokens * shape.heads * shape.head_dim * shape.layers
    return (products + attention) / 1e9


def measure(runners: list[ContestantProcess], counts: list[int], rounds: int) -> None:
    """Run every prompt with every engine in turn."""
    random = Random(7)
    for _ in range(rounds):
        for tokens in counts:
            prompt = [random.randrange(100, VOCABULARY) for _ in range(tokens)]
            for runner in runners:
                runner.note(f"{tokens}", runner.ask("generate", [prompt], 1))


def table(runners: list[ContestantProcess], counts: list[int], shape: DecoderShape) -> str:
    """Return tokens a processor second, GFLOP/s, and how often as fast as transformers it is."""
    heads = " | ".join(f"{tokens} tokens" for tokens in counts)
    lines = [f"| engine | {heads} |", "|---" * (len(counts) + 1) + "|"]
    rival = next((runner for runner in runners if runner.name == VENDOR), None)
    for runner in runners:
        cells = []
        for tokens in counts:
            took_s = runner.best[f"{tokens}"]
            cell = f"{tokens / took_s:.0f} tok/s, {prefill_gflop(shape, tokens) / took_s:.0f}"
            cells.append(cell + (f", {rival.best[f'{tokens}'] / took_s:.2f}x" if rival else ""))
        lines.append(f"| {runner.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(folder: Path, gguf: Path | None, python: str, counts: list[int], rounds: int) -> None:
    """Start all engines, measure and print the table."""
    runners = [start(f"ours-{kind}", folder, 1) for kind in ("exact-f16", "f16", "int8")]
    if gguf is not None:
        for kind in ("packed", "int8"):
            runners.append(start(f"ours-{kind}", gguf, 1))
            runners[-1].name += f" of {gguf.name}"
    if python:
        runners.append(start(VENDOR, folder, 1, python))
    source = open_checkpoint(folder)
    shape = source.shape
    source.close()
    try:
        measure(runners, counts, rounds)
    finally:
        for runner in runners:
            runner.process.terminate()
    print(table(runners, counts, shape))


def main() -> None:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--made-up-millions", type=int, default=0)
    parser.add_argument("--vendor-python", default="", help="a Python that has transformers")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not args.made_up_millions:
        compare(args.folder, args.gguf, args.vendor_python, args.tokens, args.rounds)
        return
    if args.gguf is None:
        sys.exit("cannot make up a model: name a GGUF file for its vocabulary with --gguf")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "made-up"
        write_made_up(folder, args.gguf, args.made_up_millions * 2_000_000)
        compare(folder, None, args.vendor_python, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
