"""Gets the identity of a node or router: from its state folder, or in exchange for a join token."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from ssl import SSLContext
from tempfile import TemporaryFile
from typing import Final

import aiohttp
import msgspec

from isochrone.service.config import ConfigError
from isochrone.service.http_responses import parse_error_body, read_response
from isochrone.service.network.connection_errors import describe_connection_error
from isochrone.service.trust import identity as identities
from isochrone.service.trust.identity import SCHEDULER_NAME, Identity, IdentityError
from isochrone.service.trust.tls import verifying_context
from isochrone.wire.peers.control import JoinReply, JoinRequest, PeerRole, join_token_command

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
JOIN_TIMEOUT_S: Final = 30.0
"""Longer than a scheduler waits for its database, which it does for up to 10 s a statement: a peer
that gives up before has used up its token and got no certificate."""

RESPONSE_BYTES_MAX: Final = 256 * 1024
IDENTITY_BYTES: Final = 16 * 1024
"""More than a stored identity takes."""


async def load_or_join(
    *, urls: Sequence[str], token_file: Path | None, role: PeerRole, name: str, folder: Path
) -> Identity:
    """Return the identity stored in `folder`, or join for one; raises ConfigError."""
    try:
        identity = await asyncio.to_thread(identities.load_identity, folder)
        if identity is not None:
            _check_owner(identity, role, name, folder)
            return identity
        if token_file is None or not urls:
            missing = "no scheduler to join" if token_file else "no join_token_file"
            raise ConfigError(
                f"cannot start: {folder} contains no identity, and {missing} is given; create a "
                f"token with `{join_token_command(role)}` and name the schedulers' URLs"
            )
        token = await asyncio.to_thread(_read_token, token_file)
        return await join(urls=urls, token=token, role=role, name=name, folder=folder)
    except IdentityError as error:
        raise ConfigError(str(error)) from error


def _check_owner(identity: Identity, role: PeerRole, name: str, folder: Path) -> None:
    """Raise IdentityError if a stored identity is of another service; warn of another name.

    A folder that was copied from another server, or given to the wrong service, has such a file. A
    router may have its host's name, which may change.
    """
    path, owner = folder / "identity.json", f"{identity.role.value} {identity.name}"
    if identity.role is not role:
        raise IdentityError(
            f"cannot start: {path} is the identity of {owner}, and this is no {identity.role.value}"
            ": give this service the state folder of its own"
        )
    if identity.name != name:
        fields = {
            "identity": owner,
            "name": name,
            "reason": f"going on as {identity.name} in {identity.pop}; if {path} was copied from"
            " another server, or to change the name, delete it and join again with a token made by"
            f" `{join_token_command(role, name=name)}`",
        }
        log.warning("the identity is of another name", extra={"fields": fields})


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot read the join token {path}: {reason}") from error


async def join(
    *, urls: Sequence[str], token: str, role: PeerRole, name: str, folder: Path
) -> Identity:
    """Trade a join token for a certificate and store it in `folder`; raises IdentityError."""
    parsed = identities.parse_join_token(token)
    if parsed is None:
        raise IdentityError("cannot join: the token is not of the form ij1_...; copy all of it")
    await asyncio.to_thread(_check_writable, folder)
    key_pem = identities.new_key_pem()
    csr_pem = identities.make_csr(key_pem, name)
    request = JoinRequest(token=token, role=role, name=name, csr_pem=csr_pem)
    reply = await _request_certificate(urls, request, parsed.fingerprint)
    _check_authority(reply.ca_pem, parsed.fingerprint)
    identity = Identity(
        name=reply.name,
        role=role,
        pop=reply.pop,
        cluster_id=reply.cluster_id,
        key_pem=key_pem,
        certificate_pem=reply.certificate_pem,
        ca_pem=reply.ca_pem,
    )
    await asyncio.to_thread(identities.save_identity, folder, identity)
    return identity


def _check_writable(folder: Path) -> None:
    """Raise IdentityError if an identity cannot be stored, before the token is used up."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(IDENTITY_BYTES))
    except OSError as error:
        raise IdentityError(
            f"cannot join: no identity can be stored in {folder}: {error}"
        ) from error


async def _request_certificate(
    urls: Sequence[str], request: JoinRequest, fingerprint: str
) -> JoinReply:
    """Return the reply of the first scheduler that issues a certificate."""
    problems: list[str] = []
    timeout = aiohttp.ClientTimeout(total=JOIN_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for url in (url.rstrip("/") for url in urls):
            try:
                async with http.post(
                    f"{url}/v1/join",
                    data=msgspec.json.encode(request),
                    headers={"content-type": "application/json"},
                    server_hostname=SCHEDULER_NAME,
                    ssl=await _verified_tls(http, url, fingerprint),
                ) as response:
                    body = await read_response(response, RESPONSE_BYTES_MAX)
                    if response.status == 200:
                        return msgspec.json.decode(body, type=JoinReply)
                    refusal = parse_error_body(body, response.status).message
                    problems.append(f"{url}: {refusal.removeprefix('cannot join: ')}")
            except aiohttp.ClientConnectorCertificateError as error:
                # Only the cluster's authority counts: no other can be set.
                problems.append(f"{url}: {error}")
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                problems.append(f"{url}: {describe_connection_error(url, error)}")
    raise IdentityError("cannot join: " + "; ".join(problems))


async def _verified_tls(
    http: aiohttp.ClientSession, url: str, fingerprint: str
) -> SSLContext | bool:
    """Return a TLS context that verifies the scheduler before the token is sent to it.

    The authority's certificate is fetched over an unverified connection and compared with the
    fingerprint in the token. Only a server with a scheduler certificate of that authority then
    receives the token.
    """
    if not url.startswith("https:"):
        return True
    async with http.get(f"{url}/v1/ca", ssl=False) as response:
        ca_pem = (await read_response(response, RESPONSE_BYTES_MAX)).decode(errors="replace")
    _check_authority(ca_pem, fingerprint)
    return verifying_context(ca_pem)


def _check_authority(ca_pem: str, fingerprint: str) -> None:
    try:
        is_expected = identities.fingerprint(ca_pem).startswith(fingerprint)
    except ValueError:
        is_expected = False
    if not is_expected:
        raise IdentityError("cannot join: the authority is not the one that the token names")
