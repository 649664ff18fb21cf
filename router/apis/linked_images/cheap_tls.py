"""TLS of downloads whose handshakes cost the router little, whatever a host chooses.

A handshake runs in the event loop, which serves all clients. A host could choose a finite field of
10,000 bits (0.6 s of CPU with OpenSSL 3.0) or `ffdhe8192` (0.13 s), for each link and each
redirect, or ask for one handshake after the other on a connection (renegotiation of TLS 1.2).
"""

import ssl
from typing import Final

_CURVE: Final = "prime256v1"
"""The curve that every implementation of TLS 1.3 must have (RFC 8446, 9.1); 0.1 ms."""

_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Those of TLS 1.2. All of TLS 1.3 are usable."""


def with_cheap_handshakes(context: ssl.SSLContext) -> ssl.SSLContext:
    """Let a client's context use elliptic curves only, and one handshake a connection."""
    context.set_ciphers(_CIPHERS)
    # For a client these are all groups that it offers.
    context.set_ecdh_curve(_CURVE)
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context
