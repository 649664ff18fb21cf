"""How a peer comes by its papers: those of its folder, or new ones for a join token."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from ssl import SSLContext
from tempfile import TemporaryFile
from typing import Final

import aiohttp
import msgspec

from isochrone.service import identity as papers
from isochrone.service.config import ConfigError
from isochrone.service.http_responses import parse_error_body, read_response
from isochrone.service.identity import Identity, IdentityError
from isochrone.service.tls import verifying_context
from isochrone.wire.control import JoinReply, JoinRequest, PeerRole

CONNECT_TIMEOUT_S: Final = 5.0
JOIN_TIMEOUT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 256 * 1024
PAPERS_BYTES: Final = 16 * 1024


async def load_or_join(
    *, urls: Sequence[str], token_file: Path | None, role: PeerRole, name: str, folder: Path
) -> Identity:
    """Return the papers that `folder` holds, or join for them, or raise ConfigError."""
    try:
        identity = await asyncio.to_thread(papers.load_identity, folder)
        if identity is not None:
            return identity
        if token_file is None or not urls:
            lacking = "no scheduler to join" if token_file else "no join_token_file"
            raise ConfigError(
                f"cannot start: {folder} holds no identity, and {lacking} is given; make a token "
                "with `isochrone nodes join-token POP` and name the schedulers' URLs"
            )
        token = await asyncio.to_thread(_read, token_file)
        return await join(urls=urls, token=token, role=role, name=name, folder=folder)
    except IdentityError as error:
        raise ConfigError(str(error)) from error


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot read the join token {path}: {why}") from error


async def join(
    *, urls: Sequence[str], token: str, role: PeerRole, name: str, folder: Path
) -> Identity:
    """Trade a one-time token for a certificate and keep it in `folder`, or raise IdentityError."""
    known = papers.parse_join_token(token)
    if known is None:
        raise IdentityError("cannot join: the token is not of the form ij1_..., copy it whole")
    await asyncio.to_thread(_try_to_write, folder)
    key_pem = papers.new_key_pem()
    request = JoinRequest(token=token, role=role, name=name, csr_pem=papers.make_csr(key_pem, name))
    reply = await _ask_to_join(urls, request, known.fingerprint)
    _check_authority(reply.ca_pem, known.fingerprint)
    identity = Identity(
        name=reply.name,
        role=role,
        pop=reply.pop,
        cluster_id=reply.cluster_id,
        key_pem=key_pem,
        certificate_pem=reply.certificate_pem,
        ca_pem=reply.ca_pem,
    )
    await asyncio.to_thread(papers.save_identity, folder, identity)
    return identity


def _try_to_write(folder: Path) -> None:
    """See that papers can be kept, before a token is spent on them."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(PAPERS_BYTES))
    except OSError as error:
        raise IdentityError(f"cannot join: no papers can be kept in {folder}: {error}") from error


async def _ask_to_join(urls: Sequence[str], request: JoinRequest, fingerprint: str) -> JoinReply:
    problems: list[str] = []
    timeout = aiohttp.ClientTimeout(total=JOIN_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for url in (url.rstrip("/") for url in urls):
            try:
                async with http.post(
                    f"{url}/v1/join",
                    data=msgspec.json.encode(request),
                    headers={"content-type": "application/json"},
                    server_hostname=papers.SCHEDULER_NAME,
                    ssl=await _trust(http, url, fingerprint),
                ) as response:
                    body = await read_response(response, ANSWER_BYTES_MAX)
                    if response.status == 200:
                        return msgspec.json.decode(body, type=JoinReply)
                    problems.append(f"{url}: {parse_error_body(body, response.status).words}")
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                problems.append(f"{url}: {error or type(error).__name__}")
    raise IdentityError("cannot join: " + "; ".join(problems))


async def _trust(http: aiohttp.ClientSession, url: str, fingerprint: str) -> SSLContext | bool:
    """Return how to know the scheduler before the token is shown to it.

    Its authority is asked for over an unproven connection and held against the fingerprint in the
    token; only who has this authority's certificate for a scheduler then gets to see the token.
    """
    if not url.startswith("https:"):
        return True
    async with http.get(f"{url}/v1/ca", ssl=False) as response:
        ca_pem = (await read_response(response, ANSWER_BYTES_MAX)).decode(errors="replace")
    _check_authority(ca_pem, fingerprint)
    return verifying_context(ca_pem)


def _check_authority(ca_pem: str, fingerprint: str) -> None:
    try:
        is_ours = papers.fingerprint(ca_pem).startswith(fingerprint)
    except ValueError:
        is_ours = False
    if not is_ours:
        raise IdentityError("cannot join: the authority is not the one that the token names")
