"""Moderations and classification by a deployment that classifies, with the unmodified SDKs."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import cloudflare
import httpx
import msgspec
import openai
import pytest
from openai.types import ModerationCreateResponse

from router.apis.openai.moderations import CATEGORIES, category_of, moderation_result
from tests.integration.router.fleet_of import KEY, Bench, a_bench, a_key, a_route, a_table
from tests.integration.router.test_openai_sdk import a_client

LABELS = ("OK", "Self_Harm", "spam")


@asynccontextmanager
async def a_sorting_bench(
    folder: Path, *, labels: tuple[str, ...] = LABELS, names: Sequence[str] = ("sorter", "tiny")
) -> AsyncIterator[Bench]:
    """Run a router whose deployments classify, all but `tiny`."""
    async with a_bench(folder) as bench:
        table = a_table([a_route(bench.nodes[0])], generation=2, names=names, keys=[a_key()])
        deployments = tuple(
            entry
            if entry.name == "tiny"
            else msgspec.structs.replace(entry, kind="classify", labels=labels)
            for entry in table.deployments
        )
        bench.app.fleet.adopt(msgspec.structs.replace(table, deployments=deployments))
        yield bench


def test_labels_are_mapped_to_categories() -> None:
    assert category_of("S3") == "sexual/minors"
    assert category_of("hate_threatening") == "hate/threatening"
    assert category_of("toxic") == "toxic"
    assert category_of("Not hate") is None
    result = moderation_result({"safe": 0.99, "H": 0.2, "hate": 0.5, "toxic": 0.1})
    assert (result["flagged"], result["categories"]["hate"]) == (True, True)
    assert result["category_scores"]["hate"] == 0.5
    assert set(result["categories"]) == {*CATEGORIES, "toxic"}
    assert moderation_result({"OK": 1.0, "V2": 0.49})["flagged"] is False


async def test_texts_are_moderated(tmp_path: Path) -> None:
    async with a_sorting_bench(tmp_path) as bench, a_client(bench) as client:
        answer = await client.moderations.create(model="sorter", input=["one", "two"])
        checked = ModerationCreateResponse.model_validate(answer.to_dict())
        assert [result.flagged for result in checked.results] == [True, True]
        first = checked.results[0]
        assert (first.categories.self_harm, first.category_scores.self_harm) == (True, 0.7)
        assert (first.categories.violence, first.category_scores.violence) == (False, 0.0)
        assert first.to_dict()["category_scores"]["spam"] == 0.2  # type: ignore[index]
        alone = await client.moderations.create(input="one")
        assert alone.model == "sorter", "the only one that classifies"
        parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert len((await client.moderations.create(input=parts)).results) == 1
        assert msgspec.json.decode(bench.nodes[0].bodies[-1])["input"] == ["a\nb"]
        bench.nodes[0].probs = [0.9, 0.05, 0.05]
        assert not (await client.moderations.create(input="fine")).results[0].flagged


async def test_what_cannot_be_moderated_is_refused_by_name(tmp_path: Path) -> None:
    async with a_sorting_bench(tmp_path) as bench, a_client(bench) as client:
        picture: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
        refusals: list[tuple[dict[str, Any], str]] = [
            (
                {"input": "x", "model": "tiny"},
                "'tiny' with /v1/moderations: .*needs one of kind 'classify'",
            ),
            ({"input": picture}, "read no images"),
            ({"input": ["a", ""]}, "not empty"),
            ({"input": ""}, "'input'"),
            ({"input": "x", "extra_body": {"threshold": 1}}, "'threshold'"),
        ]
        for fields, reason in refusals:
            with pytest.raises(openai.BadRequestError, match=reason):
                await client.moderations.create(**fields)
        with pytest.raises(openai.NotFoundError, match="'omni-moderation-latest'"):
            await client.moderations.create(model="omni-moderation-latest", input="x")
        bench.nodes[0].probs = []
        with pytest.raises(openai.BadRequestError, match="'classify'"):
            await client.embeddings.create(model="sorter", input="x")


@pytest.mark.parametrize(
    ("bench_fields", "fields", "reason"),
    [
        ({"names": ("sorter", "other")}, {}, "for this key: sorter, other"),
        ({"labels": ("LABEL_0", "LABEL_1")}, {"model": "sorter"}, "labels have no names"),
        ({"labels": ()}, {"model": "sorter"}, "labels have no names"),
    ],
)
async def test_a_model_that_says_nothing_is_not_chosen(
    tmp_path: Path, bench_fields: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    async with a_sorting_bench(tmp_path, **bench_fields) as bench, a_client(bench) as client:
        with pytest.raises(openai.BadRequestError, match=reason):
            await client.moderations.create(input="x", **fields)


async def test_a_model_of_another_kind_is_refused_with_the_path_of_the_client(
    tmp_path: Path,
) -> None:
    chat = {"model": "sorter", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    counted = {name: chat[name] for name in ("model", "messages")}
    async with a_sorting_bench(tmp_path) as bench:
        for path, body in (
            ("/v1/messages", chat),
            ("/v1/messages/count_tokens", counted),
            ("/v1/responses", {"model": "sorter", "input": "x"}),
            ("/ai/v1/chat/completions", chat),
            ("/ai/run/sorter", {"prompt": "x"}),
        ):
            async with bench.http.post(f"{bench.url}{path}", json=body) as answer:
                assert answer.status == 400
                assert f"'sorter' with {path}: it is" in await answer.text()


async def test_workers_ai_classifies(tmp_path: Path) -> None:
    async with a_sorting_bench(tmp_path) as bench:
        async with cloudflare.AsyncCloudflare(
            base_url=f"{bench.url}/client/v4",
            api_token=KEY,
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False),
        ) as client:
            ranked: Any = await client.ai.run("sorter", account_id="a", text="hello")
            assert [(item["label"], item["score"]) for item in map(dict, ranked)] == [
                *[("Self_Harm", 0.7), ("spam", 0.2), ("OK", 0.1)],
            ]
        async with bench.http.post(f"{bench.url}/ai/run/sorter", json={"text": ["a"]}) as answer:
            assert answer.status == 400
            assert "takes one text" in (await answer.json())["errors"][0]["message"]
        url = f"{bench.url}/ai/models/search?task=Text+Classification"
        async with bench.http.get(url) as answer:
            assert [model["name"] for model in (await answer.json())["result"]] == ["sorter"]
        async with bench.http.get(f"{bench.url}/ai/models/schema?model=sorter") as answer:
            assert (await answer.json())["result"]["output"]["type"] == "array"
