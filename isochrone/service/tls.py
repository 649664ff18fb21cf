"""TLS contexts: at least 1.2, both ends with certificates of the cluster's authority."""

import asyncio
import logging
import ssl
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Final

from isochrone.service.config import ConfigError
from isochrone.service.identity import Authority, Identity

log = logging.getLogger(__name__)

CERTIFICATE_CHECK_S: Final = 30.0


class ReloadingCertificate:
    """An operator's certificate and key, as `tls_certificate` and `tls_key` name them.

    The files are looked at again every CERTIFICATE_CHECK_S:
    one that was renewed is shown from the next
    handshake on, and open connections stay as they are.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files, or raise ConfigError."""
        self._paths = (certificate, key)
        self._read_at: tuple[int, ...] = ()
        self.context = _serving()
        self._follow()

    async def run_once(self) -> bool:
        """Say whether other files were found and taken."""
        return await asyncio.to_thread(self._follow)

    def _follow(self) -> bool:
        try:
            written_at = tuple(path.stat().st_mtime_ns for path in self._paths)
            if written_at == self._read_at:
                return False
            # Tried elsewhere first: a key that does not fit would leave a context without any.
            _serving().load_cert_chain(*self._paths)
            self.context.load_cert_chain(*self._paths)
        except OSError as error:
            certificate, key = self._paths
            raise ConfigError(
                f"cannot use tls_certificate {certificate} with tls_key {key}: "
                f"{error.strerror or error}"
            ) from error
        if self._read_at:
            log.info("certificate renewed", extra={"fields": {"file": str(self._paths[0])}})
        self._read_at = written_at
        return True


def load_tls_certificate(certificate: Path | None, key: Path | None) -> ReloadingCertificate | None:
    """Return what to serve TLS with; None, and so in plain, only where neither file is named."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("cannot serve TLS: give both tls_certificate and tls_key, or neither")
    return ReloadingCertificate(certificate, key)


def control_server_context(authority: Authority, now: datetime) -> ssl.SSLContext:
    """Serve a scheduler's control door with a certificate of the cluster's own authority."""
    context = _serving()
    _load_papers(context, *authority.issue_scheduler_certificate(now))
    return context


def verifying_context(ca_pem: str) -> ssl.SSLContext:
    """Dial who holds a certificate of this authority, having none of our own yet.

    Addresses prove nothing: the name it must be for, a node's or SCHEDULER, is given with each dial
    as its `server_hostname`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=ca_pem)
    return context


def node_server_context(identity: Identity) -> ssl.SSLContext:
    """Serve a node's door to routers of the same cluster only (mTLS)."""
    context = _serving()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.ca_pem)
    _load_papers(context, identity.key_pem, identity.certificate_pem)
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """Dial a scheduler or a node as `verifying_context` does, showing our own certificate."""
    context = verifying_context(identity.ca_pem)
    _load_papers(context, identity.key_pem, identity.certificate_pem)
    return context


def node_url(address: str, context: ssl.SSLContext | None) -> str:
    """Return the URL of a node's door: with a `context` by TLS alone, whatever its address says."""
    scheme = "http" if context is None else "https"
    return f"{scheme}://{address.rpartition('://')[2].rstrip('/')}"


def reload_identity(context: ssl.SSLContext, identity: Identity) -> None:
    """Show renewed papers from the next handshake on; open connections stay as they are."""
    _load_papers(context, identity.key_pem, identity.certificate_pem)


def _serving() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load_papers(context: ssl.SSLContext, key_pem: str, certificate_pem: str) -> None:
    # load_cert_chain reads only files; this one is private and gone when the block ends.
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as papers:
        papers.write(key_pem + certificate_pem)
        papers.flush()
        context.load_cert_chain(papers.name)
