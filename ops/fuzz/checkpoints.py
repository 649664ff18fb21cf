"""Fuzzes the readers of model files: any bytes must load or be refused with a clear error.

    python -m ops.fuzz.checkpoints --seconds 600 --found FOLDER

A case is a file of a tiny model (GGUF, safetensors or its JSON files) with a few changes. The
engine starts from it, and generates a token if that succeeds. Every outcome except success and a
CheckpointError that begins with "cannot", within a time and a memory limit, is a finding: the
changed file is kept in FOLDER. tests/integration/engine/test_hostile_files.py replays past
findings.
"""

import argparse
import json
import random
import resource
import signal
import struct
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.core.generation import Generation
from nodeagent.engine.loading import load_engine
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from ops.golden import tiny
from ops.golden.tiny_gguf import write_gguf

CASE_S: Final = 10
MEMORY_BYTES: Final = 8 * 1024**3
FAMILIES: Final = ("llama", "qwen2", "qwen3_moe")
FILES: Final = (
    "model.gguf",
    "model-00001-of-00002.gguf",
    "model-00002-of-00002.gguf",
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
PART_TENSORS: Final = 25
"""The models have 30 to 40 tensors, so this makes two parts."""

NUMBERS: Final = (0, 1, 2, 7, 8, 31, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1)
VALUES: Final[tuple[Any, ...]] = (
    *NUMBERS, -1, -(2**63), 0.5, -0.5, 1e308, 1e-320, float("inf"), float("nan"), None, True, "",
    "x", "llama3", "yarn", "\u0000", "\ud800", [], {}, [[]], [0], [-1], [2**63, 2**63], {"a": []},
    "F32", "BF16", "I64", "F8_E4M3", "a" * 5000,
)  # fmt: skip
WORDS: Final = (
    b"-1", b"0", b"1e400", b"NaN", b"null", b"[]", b"{}", b'""', b"9" * 30, b"[[[[", b"\xff\xfe",
    b'"llama3"', b"true", b'"\\ud800"', b"-9223372036854775809", b"0.5",
)  # fmt: skip


class CaseTimeout(Exception):
    """A case took longer than CASE_S."""


def write_model(folder: Path, family: str, name: str) -> None:
    """Write a valid tiny model in `folder`: a GGUF file, its parts, or a Hugging Face folder."""
    if name.endswith(".gguf"):
        parted = PART_TENSORS if "-of-" in name else 0
        write_gguf(folder / "model.gguf", family, gguf_tokenizer(), part_tensors_max=parted)
    else:
        tiny.write_folder(folder, family)
        tiny.write_tokenizer(folder)


def gguf_tokenizer() -> dict[str, object]:
    """Return a byte-level tokenizer as GGUF metadata."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [chr(0x21 + n) for n in range(tiny.VOCABULARY - 2)]
        + ["!!", "<end>"],
        "tokenizer.ggml.token_type": [1] * (tiny.VOCABULARY - 1) + [3],
        "tokenizer.ggml.merges": ["! !"],
        "tokenizer.ggml.eos_token_id": tiny.VOCABULARY - 1,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def mutate(chance: random.Random, name: str, data: bytes) -> bytes:
    """Return changed `data`: fields of its JSON if it has any, else bytes."""
    if name.endswith(".gguf") or chance.random() < 0.3:
        return mutate_bytes(chance, data)
    if name.endswith(".json"):
        return _mutate_json(chance, data)
    size = int.from_bytes(data[:8], "little")
    header = _mutate_json(chance, data[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _mutate_json(chance: random.Random, data: bytes) -> bytes:
    document = json.loads(data)
    for _ in range(chance.randint(1, 2)):
        container = document
        while True:
            keys = list(container) if isinstance(container, dict) else list(range(len(container)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(container[key], dict | list) and container[key] and chance.random() < 0.9:
                container = container[key]
                continue
            if chance.random() < 0.2:
                del container[key]
            elif isinstance(container[key], int) and chance.random() < 0.5:
                container[key] += chance.choice((-64, -16, -1, 1, 16, 64))
            else:
                container[key] = chance.choice((*VALUES, container[chance.choice(keys)]))
            break
    return json.dumps(document).encode()


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    """Return `data` with one to four changes, most of them near the beginning."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if not changed:
            break
        # Headers come first and matter most.
        reach = min(len(changed), chance.choice((64, 512, 4096, len(changed))))
        at = chance.randrange(reach)
        kind = chance.randrange(7)
        if kind == 0:
            changed[at] = chance.randrange(256)
        elif kind == 1:
            layout = chance.choice(("<I", "<Q", ">I", "<d"))
            number = chance.choice(NUMBERS)
            packed = struct.pack(layout, number % 2**32 if layout[1] == "I" else number)
            changed[at : at + len(packed)] = packed
        elif kind == 2:
            del changed[chance.randrange(len(changed)) :]
        elif kind == 3:
            del changed[at : at + chance.randint(1, 64)]
        elif kind == 4:
            start = chance.randrange(reach)
            changed[at:at] = changed[start : start + chance.randint(1, 128)]
        elif kind == 5:
            changed[at : at + chance.randint(0, 8)] = chance.choice(WORDS)
        else:
            start = chance.randrange(reach)
            length = chance.randint(1, 32)
            changed[at : at + length] = changed[start : start + length]
    return bytes(changed)


def run(folder: Path, name: str) -> str:
    """Start an engine on the model in `folder`; return the outcome, or raise if it is a finding."""
    path = folder / name if name.endswith(".gguf") else folder
    config = EngineConfig(
        model_path=str(path),
        served_name="fuzzed",
        socket="unused",
        threads=1,
        kv_memory_bytes=4 * 1024 * 1024,
    )
    try:
        loaded = load_engine(config)
    except CheckpointError as error:
        if not str(error).startswith("cannot"):
            raise
        return "refused"
    if min(loaded.context_tokens, loaded.engine.scheduler.sequence_tokens_max) < 4:
        return "loaded"
    loaded.vocabulary.encode("a!!b", special=True)
    sequence = Sequence(1, [1, 2], StopConditions(2, frozenset()))
    loaded.engine.submit(
        Generation(
            sequence,
            Sampler(SamplingParams(temperature=0), []),
            StreamDetokenizer(loaded.vocabulary),
            StopStrings(()),
        )
    )
    while loaded.engine.has_work:
        loaded.engine.step()
    return "generated"


def main() -> None:
    """Make and run cases until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--found", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.found.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _on_alarm)
    chance = random.Random(arguments.seed)
    outcomes: Counter[str] = Counter()
    found: set[str] = set()
    with tempfile.TemporaryDirectory() as temporary:
        models = _write_models(Path(temporary))
        until_s = time.monotonic() + arguments.seconds
        while time.monotonic() < until_s:
            folder, name = chance.choice(models)
            whole = (folder / name).read_bytes()
            case = mutate(chance, name, whole)
            outcome = _run_case(folder, name, case, found, arguments.found)
            outcomes[f"{name}: {outcome}"] += 1
            (folder / name).write_bytes(whole)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8} {outcome}")


def _write_models(root: Path) -> list[tuple[Path, str]]:
    models: list[tuple[Path, str]] = []
    for family in FAMILIES:
        for name in FILES:
            folder = root / family / name
            folder.mkdir(parents=True)
            write_model(folder, family, name)
            models.append((folder, name))
    return models


def _run_case(folder: Path, name: str, case: bytes, found: set[str], kept: Path) -> str:
    """Run one case and return its outcome; the first finding of each kind is printed and kept."""
    # A new file, because a memory-mapped one must not change under its reader.
    (folder / name).unlink()
    (folder / name).write_bytes(case)
    signal.alarm(CASE_S)
    try:
        return run(folder, name)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        mark = f"{type(error).__name__}-{Path(frame.filename).stem}-{frame.lineno}"
        if mark not in found:
            found.add(mark)
            (kept / f"{folder.parent.name}-{mark}-{name}").write_bytes(case)
            print(f"found {mark}: {error!s:.300}", flush=True)
        return "wrong"
    finally:
        signal.alarm(0)


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    raise CaseTimeout(f"more than {CASE_S} s")


if __name__ == "__main__":
    main()
