"""Identity: the cluster's certificate authority, the certificates it issues, and join tokens.

A node or router creates its own key, exchanges a join token for a certificate, and signs a nonce
with the key on each control connection. In a certificate's subject CN is the name, OU the role and
L the PoP. Keys are ECDSA P-256.
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
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isochrone.service.files import write_atomic
from isochrone.wire.ids import ClusterId, PopId, is_name, is_pop
from isochrone.wire.peers.control import PeerRole

CERTIFICATE_LIFETIME_S: Final = 90 * 24 * 3600.0
AUTHORITY_LIFETIME_DAYS: Final = 3650
CLOCK_SKEW: Final = timedelta(minutes=5)
"""How long before its first and after its last moment a certificate still counts as valid. It is
dated back by this time and BACKDATED_MAX together."""

BACKDATED_MAX: Final = timedelta(days=1)
BACKDATED_SHARE: Final = 1 / 10
"""Certificates are dated back by this time, as those of public authorities are, but by no larger
share of their lifetime: TLS knows no CLOCK_SKEW, and a machine may have the wrong time zone."""

FINGERPRINT_DIGITS: Final = 32
"""How many hex digits of the authority's fingerprint a join token carries."""

SCHEDULER_NAME: Final = "_scheduler"
"""The name in a scheduler's certificate; no peer can have it, as names start with no underscore."""

_USAGES: Final = {
    PeerRole.AGENT: [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
    PeerRole.ROUTER: [ExtendedKeyUsageOID.CLIENT_AUTH],
}
"""A router's certificate cannot serve TLS, so it cannot pass for a node of the same name."""

_UNREADABLE: Final = (ValueError, UnsupportedAlgorithm, x509.InvalidVersion)
"""The errors that the library raises for a certificate or request that it cannot use."""

_TOKEN = re.compile(r"^ij1_([0-9a-f]{32})_([a-z0-9]{12})_([0-9A-Za-z]{43})$")


class IdentityError(Exception):
    """A certificate, certificate request or token cannot be used; the message says why."""


class CertificateSubject(NamedTuple):
    """The role, name and PoP in a certificate's subject."""

    role: PeerRole
    name: str
    pop: PopId


class Certificate(NamedTuple):
    """The contents of a certificate. `serial` is in hex.

    `issued_at` is what it is dated: up to BACKDATED_MAX before it was issued, but after each
    revocation of its name at that time. A later revocation of the name refuses it.
    """

    subject: CertificateSubject
    serial: str
    issued_at: datetime
    expires_at: datetime


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A node's or router's own key and certificate, stored in its state folder with mode 0600."""

    name: str
    role: PeerRole
    pop: PopId
    cluster_id: ClusterId
    key_pem: str
    certificate_pem: str
    ca_pem: str


class JoinToken(NamedTuple):
    """A parsed join token: the expected authority's fingerprint, the token's id and its secret."""

    fingerprint: str
    token_id: str
    secret: str


class Authority:
    """The cluster's certificate authority: `ca.crt` and `ca.key` (mode 0600) in a folder."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.ca_pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        self.fingerprint = fingerprint(self.ca_pem)
        self.expires_at = certificate.not_valid_after_utc
        secret = key.private_numbers().private_value.to_bytes(32)
        self._seal_key = hashlib.sha256(b"isochrone-seal-1" + secret).digest()

    @classmethod
    def create(cls, folder: Path, cluster_name: str, now: datetime) -> "Authority":
        """Create an authority in `folder`, which must not contain one; raises IdentityError."""
        if (folder / "ca.key").exists():
            raise IdentityError(f"cannot create an authority: {folder} already contains one")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{cluster_name} authority")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATED_MAX - CLOCK_SKEW)
            .not_valid_after(now + timedelta(days=AUTHORITY_LIFETIME_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The key is written last: if it exists, the authority is complete.
            write_atomic(folder / "ca.crt", pem, mode=0o644)
            write_atomic(folder / "ca.key", _key_pem(key).encode())
        except OSError as error:
            raise IdentityError(f"cannot store an authority in {folder}: {error}") from error
        return cls(key, certificate)

    @classmethod
    def load(cls, folder: Path) -> "Authority":
        """Load the authority from `folder`; raises IdentityError."""
        try:
            key = _load_key((folder / "ca.key").read_text())
            certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        except (OSError, ValueError) as error:
            raise IdentityError(f"cannot load the authority in {folder}: {error}") from error
        if certificate.public_key() != key.public_key():
            raise IdentityError(
                f"cannot load the authority in {folder}: ca.crt does not match ca.key; copy both"
            )
        return cls(key, certificate)

    def seal(self, payload: bytes) -> str:
        """Return an HMAC by which any scheduler of this cluster recognises `payload` as its own."""
        return hmac.digest(self._seal_key, payload, "sha256").hex()

    def verify_seal(self, payload: bytes, seal: str) -> bool:
        """Return whether `seal` is the seal of `payload`. Takes constant time."""
        return hmac.compare_digest(self.seal(payload).encode(), seal.encode(errors="replace"))

    def cache_salt_secret(self, version: int) -> bytes:
        """Return the secret of the nodes' cache salts; it is the same on every scheduler."""
        payload = b"isochrone-cache-salt-1\0" + version.to_bytes(8, "big")
        key = hashlib.sha256(b"isochrone-cache-salt-key-1\0" + _key_pem(self._key).encode())
        return hmac.digest(key.digest(), payload, "sha256")

    def cipher(self) -> Fernet:
        """Return the cipher for secrets in the database; it is the same on every scheduler."""
        key = hashlib.sha256(b"isochrone-cipher-1\0" + _key_pem(self._key).encode()).digest()
        return Fernet(base64.urlsafe_b64encode(key))

    def issue_scheduler_certificate(self, now: datetime) -> tuple[str, str]:
        """Return the PEM of a new key and certificate for a scheduler's control listener."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate_pem = self._sign(
            key.public_key(),
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SCHEDULER_NAME)]),
            [x509.DNSName(SCHEDULER_NAME)],
            [ExtendedKeyUsageOID.SERVER_AUTH],
            # As old as the authority: a scheduler that has just started must be trusted by peers
            # whose clocks are far behind. Its key is new with each start.
            not_before=self._certificate.not_valid_before_utc,
            not_after=now + timedelta(days=AUTHORITY_LIFETIME_DAYS),
        )
        return _key_pem(key), certificate_pem

    def issue(
        self,
        csr_pem: str,
        *,
        role: PeerRole,
        name: str,
        pop: PopId,
        now: datetime,
        lifetime_s: float = CERTIFICATE_LIFETIME_S,
        dated_after: datetime | None = None,
    ) -> str:
        """Return a PEM certificate for the key of `csr_pem`; raises IdentityError.

        The subject is made of the arguments; names in the request are ignored. The certificate is
        dated back, but not before `dated_after`.
        """
        if not is_name(name) or not is_pop(pop):
            raise IdentityError(
                f"cannot issue a certificate for {name!r} in {pop!r}: invalid name or PoP"
            )
        try:
            csr = x509.load_pem_x509_csr(csr_pem.encode())
            public_key = csr.public_key()
            is_signed = csr.is_signature_valid
        except _UNREADABLE as error:
            raise IdentityError(f"cannot read the certificate request: {error}") from error
        if not is_signed or not isinstance(public_key, ec.EllipticCurvePublicKey):
            raise IdentityError("cannot accept the certificate request: not a signed P-256 key")
        lifetime = timedelta(seconds=lifetime_s)
        dated = now - min(BACKDATED_MAX, lifetime * BACKDATED_SHARE)
        if dated_after is not None:
            dated = max(dated, dated_after)
        return self._sign(
            public_key,
            _x509_subject(CertificateSubject(role, name, pop)),
            _alternative_names(name),
            _USAGES[role],
            not_before=dated - CLOCK_SKEW,
            not_after=now + lifetime,
        )

    def _sign(
        self,
        public_key: ec.EllipticCurvePublicKey,
        subject: x509.Name,
        names: list[x509.GeneralName],
        usages: list[x509.ObjectIdentifier],
        *,
        not_before: datetime,
        not_after: datetime,
    ) -> str:
        """Return the PEM of a certificate for a key whose owner issues no certificates."""
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(not_before)
            .not_valid_after(not_after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM).decode()


def fingerprint(ca_pem: str) -> str:
    """Return the SHA-256 of an authority's certificate, in hex."""
    der = x509.load_pem_x509_certificate(ca_pem.encode()).public_bytes(serialization.Encoding.DER)
    return hashlib.sha256(der).hexdigest()


def new_key_pem() -> str:
    """Return the PEM of a new private key."""
    return _key_pem(ec.generate_private_key(ec.SECP256R1()))


def make_csr(key_pem: str, name: str) -> str:
    """Return a PEM certificate signing request for this key and name."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    signed = request.sign(_load_key(key_pem), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def sign(key_pem: str, payload: bytes) -> bytes:
    """Sign `payload` with ECDSA over SHA-256."""
    return _load_key(key_pem).sign(payload, ec.ECDSA(hashes.SHA256()))


def verify_signature(certificate_pem: str, payload: bytes, signature: bytes) -> bool:
    """Return whether `signature` over `payload` was made with the key of the certificate."""
    public_key = _load_certificate(certificate_pem).public_key()
    if not isinstance(public_key, ec.EllipticCurvePublicKey):
        return False
    try:
        public_key.verify(signature, payload, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def verify_certificate(certificate_pem: str, ca_pem: str, now: datetime) -> Certificate:
    """Return a certificate's contents after checking its issuer and its dates.

    Raises IdentityError if another authority issued it, or if it is expired or not valid yet.
    """
    certificate = _load_certificate(certificate_pem)
    authority = _load_authority(ca_pem)
    try:
        certificate.verify_directly_issued_by(authority)
    except (*_UNREADABLE, TypeError, InvalidSignature) as error:
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
    return _contents(certificate)


def read_certificate(certificate_pem: str) -> Certificate:
    """Return a certificate's contents without verifying it; raises IdentityError."""
    return _contents(_load_certificate(certificate_pem))


def is_for_key(certificate_pem: str, key_pem: str) -> bool:
    """Return whether the certificate was issued for this key."""
    return _load_certificate(certificate_pem).public_key() == _load_key(key_pem).public_key()


def format_join_token(authority_fingerprint: str, token_id: str, secret: str) -> str:
    """Format a join token. It names the authority, so that a peer can recognise its scheduler."""
    return f"ij1_{authority_fingerprint[:FINGERPRINT_DIGITS]}_{token_id}_{secret}"


def parse_join_token(text: str) -> JoinToken | None:
    """Parse a join token; None if it is malformed."""
    match = _TOKEN.match(text)
    return JoinToken(*match.groups()) if match else None


def save_identity(folder: Path, identity: Identity) -> None:
    """Store a peer's key and certificate in its state folder with mode 0600."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(folder / "identity.json", msgspec.json.encode(identity))


def load_identity(folder: Path) -> Identity | None:
    """Load a peer's key and certificate; None if it has not joined; raises IdentityError."""
    path = folder / "identity.json"
    if not path.exists():
        return None
    try:
        identity = msgspec.json.decode(path.read_bytes(), type=Identity)
        _check_parts(identity)
    except (OSError, msgspec.DecodeError, IdentityError) as error:
        raise IdentityError(
            f"cannot use {path}: {error}; restore the file, or delete it and join again with a"
            " token bound to this server's name (`isochrone nodes join-token POP --name NAME`)"
        ) from error
    return identity


def _check_parts(identity: Identity) -> None:
    """Raise IdentityError if key, certificate and authority do not belong together."""
    certificate = _load_certificate(identity.certificate_pem)
    try:
        key = _load_key(identity.key_pem)
    except (*_UNREADABLE, TypeError) as error:
        raise IdentityError(f"cannot read the key: {error}") from error
    if certificate.public_key() != key.public_key():
        raise IdentityError("the certificate was issued for another key")
    try:
        certificate.verify_directly_issued_by(_load_authority(identity.ca_pem))
    except (*_UNREADABLE, TypeError, InvalidSignature) as error:
        raise IdentityError("another authority issued the certificate") from error


def _contents(certificate: x509.Certificate) -> Certificate:
    return Certificate(
        subject=_parse_subject(certificate.subject),
        serial=f"{certificate.serial_number:x}",
        issued_at=certificate.not_valid_before_utc + CLOCK_SKEW,
        expires_at=certificate.not_valid_after_utc,
    )


def _x509_subject(subject: CertificateSubject) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, subject.name),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, subject.role.value),
            x509.NameAttribute(NameOID.LOCALITY_NAME, subject.pop),
        ]
    )


def _alternative_names(name: str) -> list[x509.GeneralName]:
    """Return the names by which a client may verify the certificate."""
    with suppress(ValueError):
        # TLS compares a server name that looks like an IP address only with IPAddress entries.
        return [x509.DNSName(name), x509.IPAddress(IPv4Address(name))]
    return [x509.DNSName(name)]


def _parse_subject(subject: x509.Name) -> CertificateSubject:
    def attribute(oid: x509.ObjectIdentifier) -> str:
        values = subject.get_attributes_for_oid(oid)
        return str(values[0].value) if values else ""

    try:
        role = PeerRole(attribute(NameOID.ORGANIZATIONAL_UNIT_NAME))
    except ValueError as error:
        raise IdentityError(
            "cannot trust the certificate: its subject has no known role"
        ) from error
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
    except _UNREADABLE as error:
        raise IdentityError(f"cannot read the certificate: {error}") from error
