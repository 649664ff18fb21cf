"""The mock engine's sounds and images: predictable answers in the forms of OpenAI's API.

A sound has the words "t0 t1 ...": one for each AUDIO_BYTES_PER_WORD bytes of its file. A spoken
text is a WAV header and a block of silence for each word of the text. An image is one grey pixel.
"""

import asyncio
import base64
import struct
import zlib
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import web

from isochrone.service.network.http_server import json_response, read_body
from isochrone.wire.errors import ApiError, ErrorCode

AUDIO_BYTES_PER_WORD: Final = 1000
SECONDS_PER_WORD: Final = 0.5
AUDIO_BYTES_MAX: Final = 64 * 1024 * 1024
JSON_BYTES_MAX: Final = 1024 * 1024
BODY_TIMEOUT_S: Final = 30.0
TOKENS_PER_S: Final = 50
SAMPLES_PER_S: Final = 16_000
SILENCE: Final = bytes(3200)
"""A tenth of a second."""

_FIELDS: Final = msgspec.json.Decoder(dict[str, Any])


class Transcript(NamedTuple):
    """The text of a sound, and the form fields of the request."""

    words: list[str]
    fields: dict[str, str]

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage of a model that is billed by the second."""
        return {"type": "duration", "seconds": len(self.words) * SECONDS_PER_WORD}


async def transcribe(request: web.Request) -> web.StreamResponse:
    """`POST /v1/audio/transcriptions` and `/translations`."""
    transcript = await _read_sound(request)
    text, kind = " ".join(transcript.words), transcript.fields.get("response_format", "json")
    if transcript.fields.get("stream") == "true":
        return await _stream_transcript(request, transcript, text)
    if kind == "text":
        return web.Response(text=f"{text}\n", content_type="text/plain")
    if kind in ("srt", "vtt"):
        head = "WEBVTT\n\n" if kind == "vtt" else "1\n"
        times = "00:00:00.000 --> 00:00:01.000".replace(".", "." if kind == "vtt" else ",")
        return web.Response(text=f"{head}{times}\n{text}\n\n", content_type="text/plain")
    body: dict[str, Any] = {"text": text, "usage": transcript.usage}
    if kind == "verbose_json":
        seconds = len(transcript.words) * SECONDS_PER_WORD
        language = transcript.fields.get("language", "english")
        body |= {"task": "transcribe", "language": language, "duration": seconds, "segments": []}
    return json_response(body)


async def speak(request: web.Request) -> web.StreamResponse:
    """`POST /v1/audio/speech`: WAV, or events with its parts."""
    fields = _decode(await _read(request))
    words = str(fields.get("input", "")).split()
    parts = [_wav_header(), *(SILENCE for _ in words)]
    if fields.get("stream_format") != "sse":
        response = web.StreamResponse(headers={"content-type": "audio/wav"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)
        await response.write_eof()
        return response
    usage = {"input_tokens": len(words), "output_tokens": len(words)}
    usage["total_tokens"] = 2 * len(words)
    deltas = [
        {"type": "speech.audio.delta", "audio": base64.b64encode(part).decode()} for part in parts
    ]
    return await _send_events(request, [*deltas, {"type": "speech.audio.done", "usage": usage}])


async def draw(request: web.Request) -> web.StreamResponse:
    """`POST /v1/images/generations`: the same pixel in each image."""
    fields = _decode(await _read(request))
    count, prompt = fields.get("n") or 1, str(fields.get("prompt", ""))
    image = base64.b64encode(_grey_pixel()).decode()
    inputs = len(prompt.split())
    usage = {
        "input_tokens": inputs,
        "input_tokens_details": {"image_tokens": 0, "text_tokens": inputs},
        "output_tokens": count,
        "total_tokens": inputs + count,
    }
    settings = {"background": "opaque", "output_format": "png", "quality": "low", "size": "auto"}
    if not fields.get("stream"):
        data = [{"b64_json": image} for _ in range(count)]
        return json_response({"created": 1, "data": data, "usage": usage, **settings})
    head = {"b64_json": image, "created_at": 1, **settings}
    partial = [
        {"type": "image_generation.partial_image", "partial_image_index": index, **head}
        for index in range(fields.get("partial_images") or 0)
    ]
    completed = {"type": "image_generation.completed", **head, "usage": usage}
    return await _send_events(request, [*partial, completed])


async def _stream_transcript(
    request: web.Request, transcript: Transcript, text: str
) -> web.StreamResponse:
    deltas = [{"type": "transcript.text.delta", "delta": f"{word} "} for word in transcript.words]
    # OpenAI's events count tokens, where whole answers count seconds.
    heard = round(len(transcript.words) * SECONDS_PER_WORD * TOKENS_PER_S)
    usage = {"type": "tokens", "input_tokens": heard, "output_tokens": len(transcript.words)}
    usage["total_tokens"] = heard + len(transcript.words)
    done = {"type": "transcript.text.done", "text": text, "usage": usage}
    return await _send_events(request, [*deltas, done])


async def _read_sound(request: web.Request) -> Transcript:
    """Return what an uploaded sound says. Raises ApiError."""
    if request.content_type != "multipart/form-data":
        raise _invalid("expected a form with a file")
    form = await request.post()
    file = form.get("file")
    if not isinstance(file, web.FileField):
        raise _invalid("there is no file")
    size = len(await asyncio.to_thread(file.file.read))
    words = [f"t{number}" for number in range(max(1, size // AUDIO_BYTES_PER_WORD))]
    return Transcript(
        words, {name: value for name, value in form.items() if isinstance(value, str)}
    )


async def _send_events(request: web.Request, events: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
        await asyncio.sleep(0)
    await response.write_eof()
    return response


async def _read(request: web.Request) -> bytes:
    return await read_body(request, bytes_max=JSON_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        return _FIELDS.decode(body)
    except (ValueError, RecursionError) as error:
        raise _invalid(str(error)) from error


def _wav_header() -> bytes:
    """Return the header of a WAV of unknown length: 16 bits, one channel."""
    rate = struct.pack("<IIHH", SAMPLES_PER_S, 2 * SAMPLES_PER_S, 2, 16)
    return b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0\x01\0" + rate + b"data\xff\xff\xff\xff"


def _grey_pixel() -> bytes:
    """Return a PNG of one pixel."""
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"\0\x80")),
        (b"IEND", b""),
    )
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot serve the request: {reason}")
