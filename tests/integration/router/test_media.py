"""Sounds and images through the router, with the unmodified `openai` SDK and the mock engine."""

import asyncio
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types import ImageGenStreamEvent, ImagesResponse
from openai.types.audio import (
    Transcription,
    TranscriptionStreamEvent,
    TranscriptionVerbose,
    Translation,
)
from pydantic import TypeAdapter

from isochrone.wire.peers.routes import KeyLimits
from tests.integration.router.fleet_of import KEY, Bench, a_bench, a_key, a_route, a_table
from tests.integration.router.test_openai_sdk import a_client

SOUND = b"RIFF" + bytes(3000)
WORDS = "t0 t1 t2"
KINDS = ("transcription", "speech", "image")


@asynccontextmanager
async def a_media_bench(
    folder: Path, *, limits: KeyLimits | None = None, lacks: tuple[str, ...] = (), **config: Any
) -> AsyncIterator[Bench]:
    """Run a router with three deployments, each named after its kind of model."""
    async with a_bench(folder, **config) as bench:
        node = bench.nodes[0]
        routes = [
            msgspec.structs.replace(a_route(node, f"r{number}"), deployment_id=f"d-{number}")
            for number in range(1, len(KINDS) + 1)
        ]
        table = a_table(
            routes, generation=2, names=KINDS, keys=[a_key(limits=limits or KeyLimits())]
        )
        deployments = tuple(
            msgspec.structs.replace(entry, kind=entry.name, engine="mock", engine_lacks=lacks)
            for entry in table.deployments
        )
        bench.app.fleet.adopt(msgspec.structs.replace(table, deployments=deployments))
        yield bench


def strictly(kind: Any, answer: Any) -> Any:
    """Return an answer as the SDK's own type: its client does not check what it reads."""
    return TypeAdapter(kind).validate_python(answer.to_dict(mode="python"))


async def test_sounds_are_transcribed_and_translated(tmp_path: Path) -> None:
    async with (
        a_media_bench(tmp_path, usage_interval_s=600.0) as bench,
        a_client(bench) as client,
    ):
        create = client.audio.transcriptions.create
        file = ("a.wav", SOUND)
        plain = await create(model="transcription", file=file, language="en", temperature=0.5)
        assert strictly(Transcription, plain).text == WORDS
        verbose = await create(
            model="transcription",
            file=file,
            response_format="verbose_json",
            timestamp_granularities=["segment", "word"],
        )
        assert strictly(TranscriptionVerbose, verbose).duration == 1.5
        assert (
            await create(model="transcription", file=file, response_format="text") == WORDS + "\n"
        )
        assert "00:00:01,000" in await create(
            model="transcription", file=file, response_format="srt"
        )
        events = [
            strictly(TranscriptionStreamEvent, event)
            async for event in await create(model="transcription", file=file, stream=True)
        ]
        assert "".join(event.delta for event in events[:-1]) == "t0 t1 t2 "
        assert (events[-1].type, events[-1].text) == ("transcript.text.done", WORDS)
        with pytest.deprecated_call():
            translated = await client.audio.translations.create(model="transcription", file=file)
        assert strictly(Translation, translated).text == WORDS
        await bench.nodes[0].until(lambda: len(bench.nodes[0].bodies) == 6)
        rows, _ = bench.app.recorder.take_usage()
        used = [(row.prompt_tokens, row.outcome.value) for row in rows]
        assert used.count((75, "complete")) == 4, "1.5 s of sound, 50 tokens each"
        assert len(used) == 6


async def test_texts_are_spoken(tmp_path: Path) -> None:
    async with a_media_bench(tmp_path) as bench, a_client(bench) as client:
        speech = await client.audio.speech.create(
            model="speech", voice="any", input="one two three", response_format="wav", speed=1.5
        )
        assert speech.response.headers["content-type"] == "audio/wav"
        with wave.open(BytesIO(speech.content)) as sound:
            assert (sound.getframerate(), sound.getnchannels()) == (16_000, 1)
        assert speech.content.endswith(bytes(9600))
        async with client.audio.speech.with_streaming_response.create(
            model="speech", voice="any", input="one two", stream_format="sse"
        ) as events:
            lines = [line async for line in events.iter_lines() if line]
        assert [msgspec.json.decode(line[6:])["type"] for line in lines] == [
            *["speech.audio.delta"] * 3,
            "speech.audio.done",
        ]


async def test_images_are_drawn(tmp_path: Path) -> None:
    async with a_media_bench(tmp_path) as bench, a_client(bench) as client:
        images = await client.images.generate(
            model="image", prompt="a grey pixel", n=2, size="1024x1024", quality="low"
        )
        checked = strictly(ImagesResponse, images)
        assert checked.data is not None
        assert [image.b64_json[:11] for image in checked.data] == ["iVBORw0KGgo"] * 2
        events = [
            strictly(ImageGenStreamEvent, event)
            async for event in await client.images.generate(
                model="image", prompt="x", stream=True, partial_images=2, size="1024x1024"
            )
        ]
        assert [event.type.rpartition(".")[2] for event in events] == [
            *["partial_image"] * 2,
            "completed",
        ]


async def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    async with a_media_bench(tmp_path, lacks=("translations",)) as bench, a_client(bench) as client:
        file = ("a.wav", SOUND)
        listen, draw = client.audio.transcriptions.create, client.images.generate
        lacking = pytest.raises(openai.BadRequestError, match=r"/v1/audio/translations.*\(mock\)")
        with lacking, pytest.deprecated_call():
            await client.audio.translations.create(model="transcription", file=file)
        with pytest.raises(openai.BadRequestError, match="needs one of kind 'transcription'"):
            await listen(model="speech", file=file)
        with pytest.raises(openai.BadRequestError) as elsewhere:
            run = client.with_options(base_url=f"{bench.url}/ai/run")
            await run.post("/image", body={"prompt": "x"}, cast_to=object)
        assert "'image', for /v1/images/generations, " in elsewhere.value.response.text
        with pytest.raises(openai.NotFoundError, match="'whisper-1'"):
            await listen(model="whisper-1", file=file)
        unheard: list[dict[str, Any]] = [
            {"include": ["logprobs"]},
            {"known_speaker_names": ["me"]},
            {"temperature": 3.0},
            {"extra_body": {"beam": 5}},
        ]
        for fields in unheard:
            with pytest.raises(openai.BadRequestError) as refused:
                await listen(model="transcription", file=file, **fields)
            assert next(iter(fields.get("extra_body", fields))) in str(refused.value)
        unseen: list[dict[str, Any]] = [{"response_format": "url"}, {"size": "1x1; x"}, {"n": 0}]
        for fields in unseen:
            with pytest.raises(openai.BadRequestError) as refused:
                await draw(model="image", prompt="x", **fields)
            assert refused.value.param == next(iter(fields))
        with pytest.raises(openai.BadRequestError, match="'file'"):
            await listen(model="transcription", file=("a.wav", b""))
        async with bench.http.post(f"{bench.url}/v1/audio/transcriptions", json={}) as response:
            assert response.status == 400
            assert "multipart/form-data" in (await response.json())["error"]["message"]
        assert bench.nodes[0].requests == 0


async def test_an_engines_own_error_reaches_the_sdk_as_ours(tmp_path: Path) -> None:
    """Of a sound, too, whose answers may be of any type."""
    async with a_media_bench(tmp_path) as bench, a_client(bench) as client:
        node = bench.nodes[0]
        node.status, node.error_body = 422, b'{"detail": "cannot hear it"}'
        with pytest.raises(openai.BadRequestError, match="cannot hear it") as refused:
            await client.audio.transcriptions.create(model="transcription", file=("a.wav", SOUND))
        assert refused.value.code == "invalid_request"
        assert refused.value.response.headers["content-type"].startswith("application/json")


async def test_a_large_sound_is_streamed_to_disk_and_a_larger_one_refused(tmp_path: Path) -> None:
    async with (
        a_media_bench(tmp_path, audio_bytes_max=20_000_000, body_timeout_s=30.0) as bench,
        a_client(bench) as client,
    ):
        sound = bytes(range(256)) * 60_000
        answer = await client.audio.transcriptions.create(
            model="transcription", file=("a.wav", sound)
        )
        assert answer.text.endswith(" t15359")
        assert sound in bench.nodes[0].bodies[0]
        uploads = bench.app.server.bodies.uploads
        assert (uploads._size_bytes, uploads._all_bytes_max) == (0, 2**31)
        with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
            await client.audio.transcriptions.create(
                model="transcription", file=("a.wav", sound * 2)
            )
        assert bench.nodes[0].requests == 1


async def test_limits_of_keys_and_of_the_router_hold(tmp_path: Path) -> None:
    limits = KeyLimits(requests_per_min=2)
    async with (
        a_media_bench(tmp_path, limits=limits, audio_relayed_bytes_max=4000) as bench,
        a_client(bench) as client,
    ):
        listen = client.audio.transcriptions.create
        with pytest.raises(
            openai.RateLimitError, match="more than the router's memory for one tenant"
        ):
            await listen(model="transcription", file=("a.wav", SOUND * 2))
        for _ in range(2):
            await listen(model="transcription", file=("a.wav", SOUND))
        with pytest.raises(openai.RateLimitError):
            await listen(model="transcription", file=("a.wav", SOUND))
        async with a_client(bench, KEY[:20] + "x" + KEY[21:]) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.audio.transcriptions.create(
                    model="transcription", file=("a.wav", SOUND)
                )


async def test_a_sound_that_breaks_off_does_not_end_well(tmp_path: Path) -> None:
    async with (
        a_media_bench(tmp_path, usage_interval_s=600.0) as bench,
        a_client(bench) as client,
    ):
        node = bench.nodes[0]
        node.cut_at = 0
        received = b""
        with pytest.raises(Exception, match=r"(?i)incomplete|closed|peer|read"):
            async with client.audio.speech.with_streaming_response.create(
                model="speech", voice="any", input="one two"
            ) as speech:
                async for part in speech.iter_bytes():
                    received += part
                    node.may_answer.set()
        assert received == b"RIFF"
        async with asyncio.timeout(30):
            while not bench.app.recorder._usage:
                await asyncio.sleep(0.01)
        rows, _ = bench.app.recorder.take_usage()
        assert [row.outcome.value for row in rows] == ["failed"]
