"""An operator's certificate is reloaded when its files change, and only as a matching pair."""

import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from isochrone.service.config import ConfigError
from isochrone.service.trust.identity import SCHEDULER_NAME, Authority
from isochrone.service.trust.tls import load_tls_certificate, verifying_context
from tests.builders import NOW


@pytest.fixture
def write(tmp_path: Path) -> Callable[[], Authority]:
    """Write a certificate and key of a new authority each time; return the authority."""

    def write() -> Authority:
        folder = tmp_path / f"authority-{len(list(tmp_path.iterdir()))}"
        authority = Authority.create(folder, "test", NOW)
        key, certificate = authority.issue_scheduler_certificate(NOW)
        (tmp_path / "tls.key").write_text(key)
        (tmp_path / "tls.crt").write_text(certificate)
        return authority

    return write


def never(_: float) -> None:
    """Nothing is shown of files that cannot be used."""
    raise AssertionError


def is_trusted(context: ssl.SSLContext, authority: Authority) -> bool:
    """Perform a TLS handshake in memory with a client that trusts that authority."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = verifying_context(authority.ca_pem).wrap_bio(
        to_client, to_server, server_hostname=SCHEDULER_NAME
    )
    for end in (client, server, client, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError:
            return False
    return True


async def test_a_renewed_pair_is_used_and_a_mismatched_pair_is_refused(
    tmp_path: Path, write: Callable[[], Authority]
) -> None:
    first = write()
    shown: list[float] = []
    loaded = load_tls_certificate(tmp_path / "tls.crt", tmp_path / "tls.key", shown.append)
    assert loaded is not None
    assert is_trusted(loaded.context, first)
    assert not await loaded.run_once()
    key = (tmp_path / "tls.key").read_text()
    second = write()
    assert not is_trusted(loaded.context, second)
    (tmp_path / "tls.key").write_text(key)
    with pytest.raises(ConfigError, match="cannot use tls_certificate"):
        await loaded.run_once()
    assert is_trusted(loaded.context, first)
    third = write()
    assert await loaded.run_once()
    certificate = x509.load_pem_x509_certificate((tmp_path / "tls.crt").read_bytes())
    assert shown == [certificate.not_valid_after_utc.timestamp()] * 2
    assert is_trusted(loaded.context, third)
    assert not is_trusted(loaded.context, first)


def test_a_certificate_without_its_key_is_an_error_and_not_plain_http(tmp_path: Path) -> None:
    assert load_tls_certificate(None, None, never) is None
    with pytest.raises(ConfigError, match="both tls_certificate and tls_key"):
        load_tls_certificate(tmp_path / "tls.crt", None, never)
    with pytest.raises(ConfigError, match="No such file"):
        load_tls_certificate(tmp_path / "tls.crt", tmp_path / "tls.key", never)


async def test_of_a_chain_the_first_end_is_shown(
    tmp_path: Path, write: Callable[[], Authority]
) -> None:
    write()
    older = Authority.create(tmp_path / "older", "test", NOW - timedelta(days=1))
    chain = (tmp_path / "tls.crt").read_text() + older.ca_pem
    (tmp_path / "tls.crt").write_text(chain)
    shown: list[float] = []
    load_tls_certificate(tmp_path / "tls.crt", tmp_path / "tls.key", shown.append)
    of_older = x509.load_pem_x509_certificate(older.ca_pem.encode())
    assert shown == [of_older.not_valid_after_utc.timestamp()]
