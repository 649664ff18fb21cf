"""Who is who: the cluster's authority, the certificates it issues, and join tokens.

A node or router makes its own key, trades a one-time token for a certificate, and proves on each
connection that it holds the key. Names live in the certificate: CN is the name, OU the role, L the
PoP. Keys are ECDSA P-256.
"""

import base64
import hashlib
import hmac
import re
from contextlib import suppress
from datetime import datetime, timedelta
from functools import lru_cache
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isochrone.service.files import write_atomic
from isochrone.wire.control import PeerRole
from isochrone.wire.ids import ClusterId, PopId, is_name, is_pop

CERTIFICATE_LIFETIME_S: Final = 90 * 24 * 3600.0
AUTHORITY_LIFETIME_DAYS: Final = 3650
CLOCK_SKEW: Final = timedelta(minutes=5)

FINGERPRINT_DIGITS: Final = 32

SCHEDULER_NAME: Final = "_scheduler"
"""Whom the certificate of a scheduler's door is for: no peer can have such a name."""

_USAGES: Final = {
    PeerRole.AGENT: [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
    PeerRole.ROUTER: [ExtendedKeyUsageOID.CLIENT_AUTH],
}
"""A router is dialled by no peer, so that none passes for the node that has the same name."""

_TOKEN = re.compile(r"^ij1_([0-9a-f]{32})_([a-z0-9]{12})_([0-9A-Za-z]{43})$")


class IdentityError(Exception):
    """A certificate, request or token that cannot be trusted, and why."""


class CertificateSubject(NamedTuple):
    """Who a certificate says its holder is."""

    role: PeerRole
    name: str
    pop: PopId


class Certificate(NamedTuple):
    """What a certificate says: whose it is, its serial in hex, and its time."""

    subject: CertificateSubject
    serial: str
    issued_at: datetime
    expires_at: datetime


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A node's or router's own papers, kept in its state folder with mode 0600."""

    name: str
    role: PeerRole
    pop: PopId
    cluster_id: ClusterId
    key_pem: str
    certificate_pem: str
    ca_pem: str


class JoinToken(NamedTuple):
    """A one-time right to join: the authority to expect, the token's id, and its secret."""

    fingerprint: str
    token_id: str
    secret: str


class Authority:
    """The cluster's certificate authority: two files in a folder, the key with mode 0600."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.ca_pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        self.fingerprint = fingerprint(self.ca_pem)
        secret = key.private_numbers().private_value.to_bytes(32)
        self._seal_key = hashlib.sha256(b"isochrone-seal-1" + secret).digest()

    @classmethod
    def create(cls, folder: Path, cluster_name: str, now: datetime) -> "Authority":
        """Make a new authority in `folder`, which must not hold one."""
        if (folder / "ca.key").exists():
            raise IdentityError(f"cannot create an authority: {folder} already holds one")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{cluster_name} authority")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + timedelta(days=AUTHORITY_LIFETIME_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The key last: where it is, the authority is whole.
            write_atomic(folder / "ca.crt", pem, mode=0o644)
            write_atomic(folder / "ca.key", _key_pem(key).encode())
        except OSError as error:
            raise IdentityError(f"cannot keep an authority in {folder}: {error}") from error
        return cls(key, certificate)

    @classmethod
    def load(cls, folder: Path) -> "Authority":
        """Read the authority of `folder`."""
        try:
            key = _load_key((folder / "ca.key").read_text())
            certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        except (OSError, ValueError) as error:
            raise IdentityError(f"cannot load the authority in {folder}: {error}") from error
        if certificate.public_key() != key.public_key():
            raise IdentityError(
                f"cannot load the authority in {folder}: its ca.crt is not of its ca.key; copy both"
            )
        return cls(key, certificate)

    def seal(self, claim: bytes) -> str:
        """Return what proves to any scheduler of this cluster that one of them made a claim."""
        return hmac.digest(self._seal_key, claim, "sha256").hex()

    def verify_seal(self, claim: bytes, seal: str) -> bool:
        """Say whether `seal` proves the claim. Takes the same time either way."""
        return hmac.compare_digest(self.seal(claim).encode(), seal.encode(errors="replace"))

    def cipher(self) -> Fernet:
        """Return what hides a secret that the database must hold for a while; every scheduler of
        the cluster has the same."""
        key = hashlib.sha256(b"isochrone-cipher-1\0" + _key_pem(self._key).encode()).digest()
        return Fernet(base64.urlsafe_b64encode(key))

    def issue_scheduler_certificate(self, now: datetime) -> tuple[str, str]:
        """Return (key, certificate) for a scheduler's own control door."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SCHEDULER_NAME)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + timedelta(days=AUTHORITY_LIFETIME_DAYS))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.DNSName(SCHEDULER_NAME)]), critical=False
            )
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return _key_pem(key), certificate.public_bytes(serialization.Encoding.PEM).decode()

    def issue(
        self,
        csr_pem: str,
        *,
        role: PeerRole,
        name: str,
        pop: PopId,
        now: datetime,
        lifetime_s: float = CERTIFICATE_LIFETIME_S,
    ) -> str:
        """Sign a certificate for the key of `csr_pem`. The names come from us, never from it."""
        if not is_name(name) or not is_pop(pop):
            raise IdentityError(f"cannot issue a certificate for {name!r} in {pop!r}: not names")
        try:
            csr = x509.load_pem_x509_csr(csr_pem.encode())
            public_key = csr.public_key()
        except ValueError as error:
            raise IdentityError(f"cannot read the certificate request: {error}") from error
        if not csr.is_signature_valid or not isinstance(public_key, ec.EllipticCurvePublicKey):
            raise IdentityError("cannot accept the certificate request: not a signed P-256 key")
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_subject(CertificateSubject(role, name, pop)))
            .issuer_name(self._certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + timedelta(seconds=lifetime_s))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(_proven_as(name)), critical=False)
            .add_extension(x509.ExtendedKeyUsage(_USAGES[role]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM).decode()


def fingerprint(ca_pem: str) -> str:
    """Return the SHA-256 of an authority's certificate, in hex."""
    der = x509.load_pem_x509_certificate(ca_pem.encode()).public_bytes(serialization.Encoding.DER)
    return hashlib.sha256(der).hexdigest()


def new_key_pem() -> str:
    """Make a private key."""
    return _key_pem(ec.generate_private_key(ec.SECP256R1()))


def make_csr(key_pem: str, name: str) -> str:
    """Ask for a certificate: prove the possession of the key, propose a name."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    signed = request.sign(_load_key(key_pem), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def sign(key_pem: str, payload: bytes) -> bytes:
    """Sign `payload` with ECDSA over SHA-256."""
    return _load_key(key_pem).sign(payload, ec.ECDSA(hashes.SHA256()))


def verify_signature(certificate_pem: str, payload: bytes, signature: bytes) -> bool:
    """Say whether `signature` over `payload` was made with the key of the certificate."""
    public_key = _load_certificate(certificate_pem).public_key()
    if not isinstance(public_key, ec.EllipticCurvePublicKey):
        return False
    try:
        public_key.verify(signature, payload, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def verify_certificate(certificate_pem: str, ca_pem: str, now: datetime) -> Certificate:
    """Return what the certificate says, or raise IdentityError: forged, expired or not ours."""
    certificate = _load_certificate(certificate_pem)
    authority = _load_authority(ca_pem)
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise IdentityError(
            "cannot trust the certificate: another authority issued it; join this cluster again"
        ) from error
    if now < certificate.not_valid_before_utc - CLOCK_SKEW:
        raise IdentityError(
            f"cannot trust the certificate before {certificate.not_valid_before_utc}: check clocks"
        )
    if now > certificate.not_valid_after_utc + CLOCK_SKEW:
        raise IdentityError(
            f"cannot trust the certificate after {certificate.not_valid_after_utc}: join again, "
            "if the clocks are right"
        )
    return _read(certificate)


def read_certificate(certificate_pem: str) -> Certificate:
    """Return what a certificate says, believing it; raises IdentityError where it is none."""
    return _read(_load_certificate(certificate_pem))


def is_for_key(certificate_pem: str, key_pem: str) -> bool:
    """Say whether the certificate is for this key."""
    return _load_certificate(certificate_pem).public_key() == _load_key(key_pem).public_key()


def format_join_token(authority_fingerprint: str, token_id: str, secret: str) -> str:
    """Write a join token. It names the authority, so that a peer can refuse an impostor."""
    return f"ij1_{authority_fingerprint[:FINGERPRINT_DIGITS]}_{token_id}_{secret}"


def parse_join_token(text: str) -> JoinToken | None:
    """Read a join token; None where the form is wrong."""
    match = _TOKEN.match(text)
    return JoinToken(*match.groups()) if match else None


def save_identity(folder: Path, identity: Identity) -> None:
    """Keep a peer's papers in its state folder, mode 0600."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(folder / "identity.json", msgspec.json.encode(identity))


def load_identity(folder: Path) -> Identity | None:
    """Read a peer's papers; None where it has not joined yet."""
    path = folder / "identity.json"
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Identity)
    except (OSError, msgspec.DecodeError) as error:
        raise IdentityError(f"cannot read {path}: {error}") from error


def _read(certificate: x509.Certificate) -> Certificate:
    return Certificate(
        subject=_peer(certificate.subject),
        serial=f"{certificate.serial_number:x}",
        # Issued a little in the past, for clocks that are behind ours.
        issued_at=certificate.not_valid_before_utc + CLOCK_SKEW,
        expires_at=certificate.not_valid_after_utc,
    )


def _subject(peer: CertificateSubject) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, peer.name),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, peer.role.value),
            x509.NameAttribute(NameOID.LOCALITY_NAME, peer.pop),
        ]
    )


def _proven_as(name: str) -> list[x509.GeneralName]:
    """Return what a certificate says of its holder to who dials it by `name`."""
    with suppress(ValueError):
        # Whatever looks like an address is held against addresses alone.
        return [x509.DNSName(name), x509.IPAddress(IPv4Address(name))]
    return [x509.DNSName(name)]


def _peer(subject: x509.Name) -> CertificateSubject:
    def attribute(oid: x509.ObjectIdentifier) -> str:
        found = subject.get_attributes_for_oid(oid)
        return str(found[0].value) if found else ""

    try:
        role = PeerRole(attribute(NameOID.ORGANIZATIONAL_UNIT_NAME))
    except ValueError as error:
        raise IdentityError("cannot trust the certificate: it names no role") from error
    return CertificateSubject(
        role, attribute(NameOID.COMMON_NAME), PopId(attribute(NameOID.LOCALITY_NAME))
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def _load_key(pem: str) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem.encode(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IdentityError("cannot use the key: not an elliptic-curve key")
    return key


@lru_cache(maxsize=8)
def _load_authority(pem: str) -> x509.Certificate:
    return _load_certificate(pem)


def _load_certificate(pem: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except ValueError as error:
        raise IdentityError(f"cannot read the certificate: {error}") from error
