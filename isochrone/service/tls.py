"""TLS contexts: at least 1.2, both ends with certificates of the cluster's authority."""

import ssl
import tempfile
from pathlib import Path

from isochrone.service.identity import Identity


def server_context(
    certificate: Path, key: Path, *, client_ca_pem: str | None = None
) -> ssl.SSLContext:
    """Serve TLS; with `client_ca_pem`, only to holders of a certificate of that authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    if client_ca_pem is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=client_ca_pem)
    return context


def node_context(identity: Identity) -> ssl.SSLContext:
    """Serve a node's door to routers of the same cluster only (mTLS)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.ca_pem)
    _load_papers(context, identity)
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """Dial a peer of the cluster, showing our own certificate.

    The authority is the proof: certificates name nodes, while addresses are what routes carry, so
    the host name is not compared.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.load_verify_locations(cadata=identity.ca_pem)
    _load_papers(context, identity)
    return context


def _load_papers(context: ssl.SSLContext, identity: Identity) -> None:
    # load_cert_chain reads only files; this one is private and gone when the block ends.
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as papers:
        papers.write(identity.key_pem + identity.certificate_pem)
        papers.flush()
        context.load_cert_chain(papers.name)
