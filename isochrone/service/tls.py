"""TLS contexts: at least 1.2, both ends with certificates of the cluster's authority."""

import ssl
import tempfile
from datetime import datetime
from pathlib import Path

from isochrone.service.identity import Authority, Identity


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Serve TLS with an operator's own certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


def control_context(authority: Authority, now: datetime) -> ssl.SSLContext:
    """Serve a scheduler's control door with a certificate of the cluster's own authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_papers(context, *authority.issue_own(now))
    return context


def trusting(ca_pem: str) -> ssl.SSLContext:
    """Dial a peer that must hold a certificate of this authority, having none of our own yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.load_verify_locations(cadata=ca_pem)
    return context


def node_context(identity: Identity) -> ssl.SSLContext:
    """Serve a node's door to routers of the same cluster only (mTLS)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.ca_pem)
    _load_papers(context, identity.key_pem, identity.certificate_pem)
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """Dial a peer of the cluster, showing our own certificate.

    The authority is the proof: certificates name nodes, while addresses are what routes carry, so
    the host name is not compared.
    """
    context = trusting(identity.ca_pem)
    _load_papers(context, identity.key_pem, identity.certificate_pem)
    return context


def renew(context: ssl.SSLContext, identity: Identity) -> None:
    """Show renewed papers from the next handshake on; open connections stay as they are."""
    _load_papers(context, identity.key_pem, identity.certificate_pem)


def _load_papers(context: ssl.SSLContext, key_pem: str, certificate_pem: str) -> None:
    # load_cert_chain reads only files; this one is private and gone when the block ends.
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as papers:
        papers.write(key_pem + certificate_pem)
        papers.flush()
        context.load_cert_chain(papers.name)
