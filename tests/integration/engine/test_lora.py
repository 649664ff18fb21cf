"""LoRA adapters: equal to merged weights, several in a batch, loaded and unloaded while serving."""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.errors import ApiError
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.distributed.shards import WeightSlice
from nodeagent.engine.model.families import build_model
from nodeagent.engine.model.lora import ActiveAdapters
from nodeagent.engine.server.adapters import AdapterRegistry
from nodeagent.engine.weights.adapter_folder import read_adapter
from nodeagent.engine.weights.lora_adapter import LoraAdapter
from nodeagent.engine.weights.safetensors_folder import SafetensorsFolder
from ops.golden import tiny
from tests.integration.engine.conftest import EngineProcess, end, launch, wait_ready
from tests.integration.engine.forced import logits_of

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
RANK, ALPHA = 4, 6.0


def write_adapter(
    folder: Path, family: str, seed: int, parts: tuple[str, ...], **fields: Any
) -> dict[str, Tensor]:
    """Write a PEFT adapter of made-up weights; return what it adds to each merged weight."""
    folder.mkdir()
    chance = np.random.RandomState(seed)
    shapes = tiny.shapes_of(family)
    stored: dict[str, Tensor] = {}
    added: dict[str, Tensor] = {}
    for layer in range(tiny.LAYERS):
        for part in parts:
            module = f"model.layers.{layer}.{part}"
            rows, columns = shapes[f"{module}.weight"]
            down = torch.from_numpy(chance.standard_normal((RANK, columns)).astype(np.float32))
            up = torch.from_numpy(chance.standard_normal((rows, RANK)).astype(np.float32)) * 0.1
            stored[f"base_model.model.{module}.lora_A.weight"] = down
            stored[f"base_model.model.{module}.lora_B.weight"] = up
            added[f"{module}.weight"] = up @ down * (ALPHA / RANK)
    save_file(stored, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [part.rpartition(".")[2] for part in parts],
        "base_model_name_or_path": "anything",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


def modules_of(family: str, folder: Path) -> dict[str, tuple[int, int]]:
    tiny.write_folder(folder, family)
    source = SafetensorsFolder(folder)
    return build_model(source.shape, source, "cpu", torch.float32, 64).adapters.modules


def read(folder: Path, modules: dict[str, tuple[int, int]], bytes_max: int = 2**30) -> LoraAdapter:
    return read_adapter(folder.name, folder, modules, "cpu", torch.float32, bytes_max)


class Merged:
    """A model's weights with what an adapter adds in them."""

    def __init__(self, source: SafetensorsFolder, added: dict[str, Tensor]) -> None:
        self._source = source
        self._added = added

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def check(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> None:
        self._source.check(name, shape)

    def tensor(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> Tensor:
        return self._source.tensor(name, shape) + self._added.get(name, 0)


@pytest.mark.parametrize(
    ("family", "parts"),
    [("llama", ATTENTION + MLP), ("qwen2", ATTENTION[::2]), ("qwen3_moe", ATTENTION)],
)
def test_adapters_in_one_batch_equal_merged_weights(
    tmp_path: Path, family: str, parts: tuple[str, ...]
) -> None:
    modules = modules_of(family, tmp_path)
    source = SafetensorsFolder(tmp_path)
    added = [write_adapter(tmp_path / f"a{seed}", family, seed, parts) for seed in (1, 2)]
    first, second = (read(tmp_path / f"a{seed}", modules) for seed in (1, 2))
    short, long, middle = tiny.prompts()
    # The same prompt with different adapters: nothing may be shared through the prefix cache.
    prompts = [long, long, long, short, middle]
    held = [first, second, None, second, first]
    together = logits_of(source.shape, source, prompts, 17, held)
    merged: dict[int, Any] = {1: Merged(source, added[0]), 2: Merged(source, added[1])}
    for number, adapter in enumerate(held):
        weights = source if adapter is None else merged[1 if adapter is first else 2]
        (alone,) = logits_of(source.shape, weights, [prompts[number]], 100)
        wanted, found = torch.stack(alone), torch.stack(together[number])
        assert torch.allclose(found, wanted, atol=1e-4, rtol=0), number
    bare = torch.stack(together[2])
    assert (torch.stack(together[0]) - bare).abs().max() > 0.1


@pytest.mark.parametrize(
    ("family", "parts", "fields", "said"),
    [
        ("qwen3", ATTENTION, {}, r"_proj.lora_[AB].weight is \(.*\) is expected"),
        ("mixtral", ("block_sparse_moe.gate",), {}, "belongs to no module of this model"),
        ("llama", MLP, {"peft_type": "LOHA"}, "LOHA of rank 4"),
        ("llama", MLP, {"r": 0}, r"int` >= 1 - at `\$\.r"),
        ("llama", MLP, {"r": 8}, r"lora_A.weight is \(4, \d+\), \(8, \d+\) is expected"),
        ("llama", MLP, {"r": 10**6}, r"int` <= 4096 - at `\$\.r"),
        ("llama", MLP, {"use_dora": True}, "use_dora is unsupported"),
        ("llama", MLP, {"modules_to_save": ["lm_head"]}, "modules_to_save is unsupported"),
        ("llama", MLP, {"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' is unsupported"),
        ("llama", MLP, {"init_lora_weights": "loftq"}, "'loftq' is unsupported"),
        ("llama", MLP, {"alora_invocation_tokens": [1]}, "alora_invocation_tokens is unsupp"),
        ("llama", MLP, {"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is unsupp"),
        ("llama", MLP, {"lora_alpha": "6"}, "cannot read"),
    ],
)
def test_an_adapter_of_another_base_is_refused(
    tmp_path: Path, family: str, parts: tuple[str, ...], fields: dict[str, Any], said: str
) -> None:
    # The base is a Qwen2, whose heads are half as wide as those of the others.
    base = "llama" if family == "llama" else "qwen2"
    modules = modules_of(base, tmp_path)
    write_adapter(tmp_path / "a", family, 1, parts, **fields)
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path / "a", modules)


def test_inconsistent_files_are_refused_and_large_ones_not_read(tmp_path: Path) -> None:
    modules = modules_of("llama", tmp_path)
    write_adapter(tmp_path / "a", "llama", 1, MLP)
    with pytest.raises(CheckpointError, match="1000 are left"):
        read(tmp_path / "a", modules, 1000)
    path = tmp_path / "a" / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="cannot read"):
        read(tmp_path / "a", modules)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    path.unlink()
    save_file({name: torch.zeros(4, 32)}, path)
    with pytest.raises(CheckpointError, match=r"half of model.layers.0.mlp.up_proj"):
        read(tmp_path / "a", modules)
    path.unlink()
    spoilt = torch.full((48, 4), torch.nan)
    save_file({name: torch.zeros(4, 32), name.replace("_A", "_B"): spoilt}, path)
    with pytest.raises(CheckpointError, match="not finite"):
        read(tmp_path / "a", modules)
    with pytest.raises(CheckpointError, match=r"cannot read .*adapter_config.json"):
        read(tmp_path, modules)


def test_an_adapter_is_identified_by_its_weights_and_not_its_files(
    tmp_path: Path,
) -> None:
    modules = modules_of("llama", tmp_path)
    for name, seed in (("a", 1), ("b", 2)):
        folder = tmp_path / name
        write_adapter(folder, "llama", seed, MLP)
        whole = folder / "adapter_model.safetensors"
        with safe_open(whole, framework="pt") as file:
            names = list(file.keys())
        index = {"weight_map": dict.fromkeys(names, "part.safetensors")}
        (folder / f"{whole.name}.index.json").write_text(json.dumps(index))
        whole.rename(folder / "part.safetensors")
    first, second = (read(tmp_path / name, modules) for name in "ab")
    assert first.digest != second.digest
    assert first.digest == read(tmp_path / "a", modules).digest


def test_weights_that_overflow_in_the_models_dtype_are_refused(tmp_path: Path) -> None:
    modules = modules_of("llama", tmp_path)
    write_adapter(tmp_path / "a", "llama", 1, MLP, lora_alpha=1e7)
    with pytest.raises(CheckpointError, match="not finite"):
        read_adapter("a", tmp_path / "a", modules, "cpu", torch.float16, 2**30)


async def test_the_least_recently_used_adapter_is_dropped_and_read_again(tmp_path: Path) -> None:
    adding = ActiveAdapters()
    adding.modules = modules_of("llama", tmp_path)
    config = EngineConfig(model_path="m", served_name="base", socket="unused", adapters_max=2)
    adapters = AdapterRegistry(config, adding, torch.float32)
    for name in ("a", "b", "c"):
        write_adapter(tmp_path / name, "llama", 1, MLP)
        body = {"lora_name": name, "lora_path": str(tmp_path / name)}
        assert await adapters.load(json.dumps(body).encode()) == name
    assert (adapters.names, adapters.cached, adapters.reads_total) == (["a", "b", "c"], 2, 3)
    held = await adapters.get("b")
    assert held is not None
    assert adapters.reads_total == 3
    # Asked for at once by many, it is read once.
    found = await asyncio.gather(*(adapters.get("a") for _ in range(5)))
    assert all(one is found[0] for one in found)
    assert (adapters.cached, adapters.reads_total) == (2, 4)
    assert await adapters.get("b") is held
    assert await adapters.get("base") is None
    assert adapters.unload(b'{"lora_name":"b"}') == "b"
    with pytest.raises(ApiError, match="'b'"):
        await adapters.get("b")
    for body, said in (
        ({"lora_name": "b"}, "lora_path"),
        ({"lora_name": "../b", "lora_path": "x"}, "cannot use field 'lora_name'"),
        ({"lora_name": "base", "lora_path": "x"}, "the model's own name"),
        ({"lora_name": "z", "lora_path": str(tmp_path / "none")}, "cannot read"),
    ):
        with pytest.raises(ApiError, match=said):
            await adapters.load(json.dumps(body).encode())
    assert adapters.names == ["a", "c"]


@pytest.fixture(scope="module")
def serving() -> Iterator[tuple[EngineProcess, Path]]:
    with tempfile.TemporaryDirectory(prefix="lora") as name:
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        tiny.write_folder(model, "llama")
        tiny.write_tokenizer(model)
        write_adapter(folder / "sea", "llama", 1, ATTENTION + MLP)
        process = launch(folder, model_path=str(model), served_name="tiny", sequences_max=8)
        try:
            yield wait_ready(process, folder), folder
        finally:
            end(process)


@pytest.fixture
async def http(serving: tuple[EngineProcess, Path]) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving[0].session() as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


async def complete(http: aiohttp.ClientSession, model: str, **fields: Any) -> tuple[int, Any]:
    asked = {"prompt": list(range(33)), "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return await post(http, "/v1/completions", model=model, **{**asked, **fields})


async def test_an_adapter_is_loaded_and_unloaded_while_others_run(
    http: aiohttp.ClientSession, serving: tuple[EngineProcess, Path]
) -> None:
    folder = serving[1]
    status, refused = await complete(http, "sea")
    assert (status, refused["error"]["code"]) == (404, "model_not_found")
    _, bare = await complete(http, "tiny")
    place = str(folder / "sea")
    assert await post(http, "/v1/load_lora_adapter", lora_name="sea", lora_path=place) == (
        200,
        {"loaded": "sea"},
    )
    async with http.get("/v1/models") as response:
        told = {one["id"]: one.get("parent") for one in (await response.json())["data"]}
    assert told == {"tiny": None, "sea": "tiny"}
    _, adapted = await complete(http, "sea")
    assert adapted["model"] == "sea"
    assert adapted["choices"][0]["text"] != bare["choices"][0]["text"]
    # The bare model's prefix is remembered, but not for the adapter.
    assert adapted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    _, again = await complete(http, "sea")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert again["choices"][0]["text"] == adapted["choices"][0]["text"]
    both = await asyncio.gather(*(complete(http, name) for name in ("sea", "tiny", "sea")))
    assert [one["choices"][0]["text"] for _, one in both] == [
        answer["choices"][0]["text"] for answer in (adapted, bare, adapted)
    ]
    long = asyncio.create_task(complete(http, "sea", max_tokens=80))
    async with asyncio.timeout(30):
        while (await stats(http))["running"] == 0 and not long.done():
            await asyncio.sleep(0)
    status, _ = await post(http, "/v1/unload_lora_adapter", lora_name="sea")
    assert status == 200
    status, answer = await long
    assert (status, answer["usage"]["completion_tokens"]) == (200, 80)
    status, _ = await complete(http, "sea")
    assert status == 404
    status, refused = await post(
        http, "/v1/load_lora_adapter", lora_name="x", lora_path=str(folder / "model")
    )
    assert status == 400
    assert refused["error"]["message"].startswith("cannot read")
    assert (await complete(http, "tiny"))[1]["choices"] == bare["choices"]


async def stats(http: aiohttp.ClientSession) -> Any:
    async with http.get("/stats") as response:
        return await response.json()


async def test_adapters_are_read_one_at_a_time_even_if_a_request_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adding = ActiveAdapters()
    adding.modules = modules_of("llama", tmp_path)
    write_adapter(tmp_path / "a", "llama", 1, MLP)
    config = EngineConfig(model_path="m", served_name="base", socket="unused", adapters_max=2)
    adapters = AdapterRegistry(config, adding, torch.float32)
    adapters._folders["a"] = tmp_path / "a"
    began, ended = 0, 0

    def read_slowly(*given: Any) -> LoraAdapter:
        nonlocal began, ended
        began += 1
        assert began == ended + 1, "one is still being read"
        time.sleep(0.05)
        ended += 1
        return read_adapter(*given)

    monkeypatch.setattr("nodeagent.engine.server.adapters.read_adapter", read_slowly)
    for reads in (1, 2):
        leaving = asyncio.create_task(adapters.get("a"))
        async with asyncio.timeout(30):
            while began < reads:
                await asyncio.sleep(0.001)
        leaving.cancel()
        await asyncio.wait({leaving})
    assert await adapters.get("a") is not None
