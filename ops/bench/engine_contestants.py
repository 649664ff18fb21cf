"""The engines that `engine.py` compares, each in its own process and behind the same four calls.

Rule 1: same weights, same prompts (token ids), same threads, greedy sampling, no stop token.
Rule 2: a call returns seconds. The parent computes the rates.
Rule 3: transformers and llama.cpp are imported only in their own processes: they are not
dependencies of this project.
"""

import copy
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

Prompts = list[list[int]]
QUANTISATIONS: Final = {"packed": "file", "f16": "file", "int8": "int8"}
"""The option of contestants whose name it is not; all others compute with full weights."""


def clock_s() -> float:
    """Return wall time, or this process's processor time if it has one thread.

    Other load on the machine does not affect the processor time of one thread. With several
    threads, processor time would include their waiting for each other.
    """
    return time.process_time() if sys.argv[3] == "1" else time.perf_counter()


class BenchEngine(Protocol):
    """The calls that every engine answers."""

    def generate(self, prompts: Prompts, tokens: int) -> float:
        """Return the seconds to answer `prompts` at once with `tokens` each, without cached KV."""
        ...

    def prime(self, prefix: list[int]) -> None:
        """Compute the KV of `prefix`."""
        ...

    def first_token(self, prompt: list[int]) -> float:
        """Return the seconds to the first token of `prompt`, whose beginning was primed."""
        ...

    def weights_bytes(self) -> int:
        """Return the bytes of weights that one step reads."""
        ...


class EmbeddedEngine:
    """The embedded engine, stepped in the calling thread."""

    def __init__(self, model: Path, threads: int, dtype: str) -> None:
        from isochrone.wire.engines.engine import EngineConfig
        from nodeagent.engine.loading import load_engine
        from nodeagent.engine.weights.checkpoint import open_checkpoint

        values = {
            "model_path": str(model),
            "served_name": "bench",
            "socket": "unused",
            "threads": threads,
            "dtype": "bf16" if dtype == "bf16" else "fp32",
            "quantisation": QUANTISATIONS.get(dtype, "none"),
            "kv_memory_bytes": 1 << 29,
            "context_tokens_max": 8192,
            "sequences_max": 32,
            "batch_tokens_max": 512,
            # The other engines do not speculate, and answers to random prompts repeat themselves.
            "draft_tokens_max": 0,
        }
        source = open_checkpoint(model)
        self._shape = source.shape
        source.close()
        self._loaded = load_engine(msgspec.convert(values, EngineConfig))
        self._numbers = itertools.count(1)
        self._salt = b""
        self._kept = dtype
        self._from_gguf = model.suffix == ".gguf"

    def generate(self, prompts: Prompts, tokens: int) -> float:
        number = next(self._numbers)
        return self._run(prompts, tokens, b"fresh-%d" % number)

    def prime(self, prefix: list[int]) -> None:
        self._salt = b"primed-%d" % next(self._numbers)
        self._run([prefix], 1, self._salt)

    def first_token(self, prompt: list[int]) -> float:
        return self._run([prompt], 1, self._salt)

    def weights_bytes(self) -> int:
        from nodeagent.engine.kernels.cpu.library import cpu_kernels

        shape = self._shape
        if self._kept.endswith("f16") and cpu_kernels():
            # 16 bits per weight; rounded weights have a scale of 4 bytes per 32 weights.
            return int(shape.parameters() * (2 + 4 / 32 * (self._kept == "f16")))
        if self._kept not in ("packed", "int8") or not self._from_gguf:
            return self._loaded.weights_bytes
        # 4 bits per weight and 4 bytes per 32 weights; the head has 8 bits or is fp16.
        head = shape.vocabulary * shape.hidden
        head_bytes = head * (1 + 4 / 32) if cpu_kernels() else 2 * head
        return int((shape.parameters() - head) * (0.5 + 4 / 32) + head_bytes)

    def _run(self, prompts: Prompts, tokens: int, salt: bytes) -> float:
        from nodeagent.engine.core.generation import Generation
        from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
        from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
        from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer

        engine = self._loaded.engine
        started_s = clock_s()
        for prompt in prompts:
            engine.submit(
                Generation(
                    Sequence(
                        next(self._numbers), list(prompt), StopConditions(tokens, frozenset()), salt
                    ),
                    Sampler(SamplingParams(temperature=0), []),
                    StreamDetokenizer(self._loaded.vocabulary),
                    StopStrings(()),
                )
            )
        while engine.has_work:
            engine.step()
        return clock_s() - started_s


class TransformersEngine:
    """transformers' `generate`: the whole batch at once, its own KV cache."""

    def __init__(self, model: Path, threads: int, dtype: str = "float32") -> None:
        import torch
        from transformers import (  # type: ignore[import-not-found,unused-ignore]
            AutoModelForCausalLM,
        )

        self._torch = torch
        torch.set_num_threads(threads)
        loader: Any = AutoModelForCausalLM
        # Loading a GGUF file takes a minute of processor time, loading a folder one second.
        source = (
            {"pretrained_model_name_or_path": model}
            if model.is_dir()
            else {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
        )
        self._model: Any = loader.from_pretrained(**source, dtype=getattr(torch, dtype)).eval()
        self._cache: Any = None

    def generate(self, prompts: Prompts, tokens: int) -> float:
        return self._generate(prompts, tokens)

    def prime(self, prefix: list[int]) -> None:
        with self._torch.inference_mode():
            ids = self._torch.tensor([prefix])
            self._cache = self._model(ids, use_cache=True).past_key_values

    def first_token(self, prompt: list[int]) -> float:
        return self._generate([prompt], 1, past_key_values=copy.deepcopy(self._cache))

    def weights_bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self._model.parameters())

    def _generate(self, prompts: Prompts, tokens: int, **more: Any) -> float:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            started_s = clock_s()
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                repetition_penalty=1.0,
                pad_token_id=0,
                **more,
            )
            return clock_s() - started_s


class LlamaCppEngine:
    """llama.cpp through its C API: one llama_batch per step, as its own server builds it."""

    def __init__(self, model: Path, threads: int) -> None:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]
        import numpy as np

        self._api: Any = llama_cpp
        self._np = np
        self._bytes = model.stat().st_size
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), loading)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 32 * 512
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = 32
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._primed = 0

    def generate(self, prompts: Prompts, tokens: int) -> float:
        self._api.llama_memory_clear(self._memory, True)
        started_s = clock_s()
        lengths = [len(prompt) for prompt in prompts]
        following = [self._prefill(row, prompt, 0) for row, prompt in enumerate(prompts)]
        for _ in range(tokens - 1):
            rows = [(token, lengths[row], row, True) for row, token in enumerate(following)]
            self._decode(rows)
            following = [self._best(row) for row in range(len(rows))]
            lengths = [length + 1 for length in lengths]
        return clock_s() - started_s

    def prime(self, prefix: list[int]) -> None:
        self._api.llama_memory_clear(self._memory, True)
        self._prefill(0, prefix, 0)
        self._primed = len(prefix)

    def first_token(self, prompt: list[int]) -> float:
        self._api.llama_memory_seq_rm(self._memory, 0, self._primed, -1)
        started_s = clock_s()
        self._prefill(0, prompt[self._primed :], self._primed)
        return clock_s() - started_s

    def weights_bytes(self) -> int:
        return self._bytes

    def _prefill(self, sequence: int, tokens: list[int], start: int) -> int:
        rows = [
            (token, start + index, sequence, index == len(tokens) - 1)
            for index, token in enumerate(tokens)
        ]
        for at in range(0, len(rows), 512):
            self._decode(rows[at : at + 512])
        return self._best(len(rows[at:]) - 1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        if self._api.llama_decode(self._context, batch) != 0:
            raise RuntimeError(f"cannot decode {len(rows)} tokens with llama.cpp")

    def _best(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(self._np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


def build(name: str, model: Path, threads: int) -> BenchEngine:
    """Return the engine called `name`: `ours-KIND`, `transformers[-bf16]` or `llama.cpp...`."""
    if name == "transformers":
        return TransformersEngine(model, threads)
    if name == "transformers-bf16":
        return TransformersEngine(model, threads, "bfloat16")
    if name.startswith("llama.cpp"):
        return LlamaCppEngine(model, threads)
    return EmbeddedEngine(model, threads, name.removeprefix("ours-"))


def peak_bytes() -> int:
    """Return the peak memory of this process. getrusage would include that of its parent."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def serve(build: Callable[[], BenchEngine], peak: Callable[[], int]) -> None:
    """Build the engine, then serve calls, one JSON line each, until standard input ends."""
    started_s = clock_s()
    engine = build()
    _say({"load_s": clock_s() - started_s, "bytes": engine.weights_bytes()})
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        _say(peak() if call == "peak" else getattr(engine, call)(*arguments))


def _say(answer: object) -> None:
    sys.stdout.write("ANSWER " + json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve the engine that the command line names."""
    name, model, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    serve(lambda: build(name, model, threads), peak_bytes)


if __name__ == "__main__":
    main()
