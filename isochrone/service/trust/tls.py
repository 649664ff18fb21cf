"""TLS contexts: version 1.2 or later, with certificates of the cluster's authority."""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final

from cryptography import x509

from isochrone.service.config import ConfigError
from isochrone.service.trust.identity import Authority, Identity

log = logging.getLogger(__name__)

CERTIFICATE_CHECK_S: Final = 30.0


class ReloadingCertificate:
    """An operator's certificate and key: the files of `tls_certificate` and `tls_key`.

    A periodic job calls `run_once` every CERTIFICATE_CHECK_S. A renewed certificate is used from
    the next handshake on; open connections keep theirs.
    """

    def __init__(self, certificate: Path, key: Path, show_expiry: Callable[[float], None]) -> None:
        """Read the files; raises ConfigError. `show_expiry` gets the Unix time of their expiry."""
        self._paths = (certificate, key)
        self._show_expiry = show_expiry
        self._loaded_mtimes_ns: tuple[int, ...] = ()
        self.context = _server_context()
        self._load_if_changed()

    async def run_once(self) -> bool:
        """Load the files if they have changed; say whether they have."""
        return await asyncio.to_thread(self._load_if_changed)

    def _load_if_changed(self) -> bool:
        try:
            mtimes_ns = tuple(path.stat().st_mtime_ns for path in self._paths)
            if mtimes_ns == self._loaded_mtimes_ns:
                return False
            # Tried in another context first: a wrong key would leave this one unusable.
            _server_context().load_cert_chain(*self._paths)
            self.context.load_cert_chain(*self._paths)
            expires_at = _expiry(self._paths[0].read_bytes())
        except OSError as error:
            certificate, key = self._paths
            raise ConfigError(
                f"cannot use tls_certificate {certificate} with tls_key {key}: "
                f"{error.strerror or error}"
            ) from error
        if self._loaded_mtimes_ns:
            log.info("certificate renewed", extra={"fields": {"file": str(self._paths[0])}})
        self._loaded_mtimes_ns = mtimes_ns
        self._show_expiry(expires_at)
        return True


def _expiry(chain_pem: bytes) -> float:
    """Return the Unix time at which the first certificate of a chain expires; 0 if unknown."""
    try:
        chain = x509.load_pem_x509_certificates(chain_pem)
    except ValueError as error:
        # OpenSSL, which serves it, accepts more than this parser.
        log.warning(
            "cannot read when tls_certificate expires", extra={"fields": {"reason": str(error)}}
        )
        return 0.0
    return min(part.not_valid_after_utc for part in chain).timestamp()


def load_tls_certificate(
    certificate: Path | None, key: Path | None, show_expiry: Callable[[float], None]
) -> ReloadingCertificate | None:
    """Load an operator's certificate and key; None (no TLS) if neither is given.

    Raises ConfigError if only one is given, or if they cannot be used.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("cannot serve TLS: give both tls_certificate and tls_key, or neither")
    return ReloadingCertificate(certificate, key, show_expiry)


def control_server_context(authority: Authority, now: datetime) -> ssl.SSLContext:
    """Return a context for a scheduler's control listener, with a newly issued certificate."""
    context = _server_context()
    _load_key_and_certificate(context, *authority.issue_scheduler_certificate(now))
    return context


def verifying_context(ca_pem: str) -> ssl.SSLContext:
    """Return a client context without a certificate that verifies servers by this authority.

    Pass the node's name or SCHEDULER_NAME as `server_hostname` of each connection: certificates are
    issued for names and not for addresses.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=ca_pem)
    return context


def node_server_context(identity: Identity) -> ssl.SSLContext:
    """Return a context for a node's HTTP server, which requires client certificates (mTLS)."""
    context = _server_context()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.ca_pem)
    _load_key_and_certificate(context, identity.key_pem, identity.certificate_pem)
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """Return a client context that verifies servers by the authority and shows our certificate."""
    context = verifying_context(identity.ca_pem)
    _load_key_and_certificate(context, identity.key_pem, identity.certificate_pem)
    return context


def node_url(address: str, context: ssl.SSLContext | None) -> str:
    """Return the URL of a node's HTTP server: https if there is a `context`, else http.

    The scheme that the node reported in its address is ignored.
    """
    scheme = "http" if context is None else "https"
    return f"{scheme}://{address.rpartition('://')[2].rstrip('/')}"


def reload_identity(context: ssl.SSLContext, identity: Identity) -> None:
    """Use a renewed certificate and key from the next handshake on."""
    _load_key_and_certificate(context, identity.key_pem, identity.certificate_pem)


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load_key_and_certificate(context: ssl.SSLContext, key_pem: str, certificate_pem: str) -> None:
    # load_cert_chain reads only files. This one is in memory: a full disk stops no service.
    with os.fdopen(os.memfd_create("identity"), "w") as file:
        file.write(key_pem + certificate_pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
