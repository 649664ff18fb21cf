"""Signatures of models: which key has signed exactly the files of an artifact.

A signature is a bundle of OpenSSF Model Signing 1.x, made with an elliptic curve key
(`model_signing sign key`): a DSSE envelope (https://github.com/secure-systems-lab/dsse) over an
in-toto statement that lists the SHA-256 of each file. Signatures with certificates, and those of
releases before 1.0, are refused.
"""

import binascii
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from isochrone.service.config import ConfigError
from isochrone.wire.models.artifact import check_path, is_hidden
from isochrone.wire.models.model import SIGNATURE_CHARS_MAX, Artifact

BUNDLE_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://model_signing/signature/v1.0"
SIGNATURE_FILE: Final = "model.sig"
"""The usual name of a signature beside the files. It cannot sign itself."""
HASHES: Final[Mapping[str, hashes.HashAlgorithm]] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}
"""The curves of keys, each with the digest that is signed."""
KEY_DIGITS: Final = 12
"""How many digits of the digest of an unknown key are shown."""


class SignatureError(Exception):
    """A model is not signed as required; the message says why."""


class _EnvelopeSignature(msgspec.Struct):
    sig: str


class _Envelope(msgspec.Struct, rename="camel"):
    payload: str
    payload_type: str
    signatures: tuple[_EnvelopeSignature, ...]


class _KeyHint(msgspec.Struct):
    hint: str = ""


class _Material(msgspec.Struct, rename="camel"):
    public_key: _KeyHint | None = None


class _Bundle(msgspec.Struct, rename="camel"):
    media_type: str
    verification_material: _Material
    dsse_envelope: _Envelope


class _Resource(msgspec.Struct):
    name: str
    algorithm: str
    digest: str


class _Serialization(msgspec.Struct):
    method: str


class _Predicate(msgspec.Struct):
    serialization: _Serialization
    resources: tuple[_Resource, ...]


class _Statement(msgspec.Struct, rename="camel"):
    statement_type: str = msgspec.field(name="_type")
    predicate_type: str
    predicate: _Predicate


class ModelSigners:
    """The public keys, by name, of those whose signatures of models are accepted."""

    def __init__(self, keys: Mapping[str, ec.EllipticCurvePublicKey]) -> None:
        self._keys = dict(keys)

    @property
    def are_required(self) -> bool:
        """True if a model must be signed: there is a key."""
        return bool(self._keys)

    def signer(self, artifact: Artifact) -> str:
        """Return the name of the key that has signed exactly the files of `artifact`.

        Raises SignatureError.
        """
        expected = f"expected a signature of {', '.join(sorted(self._keys))}"
        if not artifact.signature:
            raise SignatureError(f"cannot use {artifact.source}: it is not signed; {expected}")
        bundle = _read_bundle(artifact.signature)
        payload = _base64(bundle.dsse_envelope.payload, "payload")
        signature = _base64(bundle.dsse_envelope.signatures[0].sig, "sig")
        for name, key in self._keys.items():
            if _has_signed(key, signature, payload):
                _check_files(artifact, payload)
                return name
        raise SignatureError(
            f"cannot use {artifact.source}: no trusted key has made its signature, which names "
            f"{_unknown_key(bundle)}; {expected}"
        )

    def problem(self, artifact: Artifact) -> str:
        """Return why a model must not be used for lack of a signature, or "".

        Without keys none is needed.
        """
        try:
            if self._keys:
                self.signer(artifact)
        except SignatureError as error:
            return str(error)
        return ""


NO_SIGNERS: Final = ModelSigners({})
"""Require no signature."""


def load_signers(paths: Iterable[Path]) -> ModelSigners:
    """Read public keys in PEM files; each is named as its file without suffix.

    Raises ConfigError.
    """
    keys: dict[str, ec.EllipticCurvePublicKey] = {}
    for path in paths:
        try:
            key = serialization.load_pem_public_key(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read model signer {path}: {error.strerror}") from error
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                f"cannot use model signer {path}: expected a public key in PEM"
            ) from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in HASHES:
            raise ConfigError(
                f"cannot use model signer {path}: expected an elliptic curve key of P-256, P-384 "
                "or P-521"
            )
        if path.stem in keys:
            raise ConfigError(f"cannot use model signer {path}: two files are named {path.stem}")
        keys[path.stem] = key
    return ModelSigners(keys)


def check_signed_files(artifact: Artifact) -> str:
    """Return which key the signature of `artifact` names, once its file list is as signed.

    The signature itself is not verified: for that the key is needed. Raises SignatureError.
    """
    bundle = _read_bundle(artifact.signature)
    _check_files(artifact, _base64(bundle.dsse_envelope.payload, "payload"))
    return _unknown_key(bundle)


def _read_bundle(text: str) -> _Bundle:
    if len(text) > SIGNATURE_CHARS_MAX:
        raise SignatureError(
            f"cannot read the signature: it is longer than {SIGNATURE_CHARS_MAX} characters"
        )
    try:
        bundle = msgspec.json.decode(text, type=_Bundle)
    except (ValueError, RecursionError) as error:
        raise SignatureError(
            f"cannot read the signature: it is no bundle of OpenSSF Model Signing ({error})"
        ) from error
    if bundle.media_type != BUNDLE_TYPE:
        raise SignatureError(
            f"cannot read the signature: its type is {bundle.media_type[:80]!r}; expected "
            f"{BUNDLE_TYPE}"
        )
    if bundle.verification_material.public_key is None:
        raise SignatureError(
            "cannot use the signature: it was made with a certificate; sign with a key "
            "(`model_signing sign key`)"
        )
    envelope = bundle.dsse_envelope
    if envelope.payload_type != PAYLOAD_TYPE:
        raise SignatureError(
            f"cannot use the signature: its payload is {envelope.payload_type[:80]!r}; expected "
            f"{PAYLOAD_TYPE}"
        )
    if len(envelope.signatures) != 1:
        raise SignatureError(
            f"cannot use the signature: it has {len(envelope.signatures)} signatures; expected one"
        )
    return bundle


def _has_signed(key: ec.EllipticCurvePublicKey, signature: bytes, payload: bytes) -> bool:
    signed = b"DSSEv1 %d %s %d " % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload))
    try:
        key.verify(signature, signed + payload, ec.ECDSA(HASHES[key.curve.name]))
    except InvalidSignature:
        return False
    return True


def _check_files(artifact: Artifact, payload: bytes) -> None:
    """Raise SignatureError unless the signed files are those of `artifact`.

    Hidden files and pickles may be signed beside them: no model in the catalogue has any.
    """
    signed = _signed_digests(payload)
    files = {file.path: file.sha256 for file in artifact.files}
    for path, sha256 in files.items():
        if path not in signed:
            raise SignatureError(f"cannot use {artifact.source}: file {path!r} is not signed")
        if signed[path] != sha256:
            raise SignatureError(
                f"cannot use {artifact.source}: file {path!r} differs from the one that was signed"
            )
    for path in signed.keys() - files.keys():
        if not (is_hidden(PurePosixPath(path)) or check_path(path) or path == SIGNATURE_FILE):
            raise SignatureError(
                f"cannot use {artifact.source}: the signed file {path!r} is missing; add it, or "
                "sign a folder without it"
            )


def _signed_digests(payload: bytes) -> dict[str, str]:
    """Return the SHA-256 of each signed file."""
    try:
        statement = msgspec.json.decode(payload, type=_Statement)
    except (ValueError, RecursionError) as error:
        raise SignatureError(f"cannot read what was signed: {error}") from error
    kinds = (statement.statement_type, statement.predicate_type)
    if kinds != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise SignatureError(
            f"cannot use the signature: it states {', '.join(kind[:80] for kind in kinds)}; "
            f"expected {STATEMENT_TYPE}, {PREDICATE_TYPE}"
        )
    resources = statement.predicate.resources
    method = statement.predicate.serialization.method
    if method != "files" or any(resource.algorithm != "sha256" for resource in resources):
        raise SignatureError(
            "cannot use the signature: it must list the SHA-256 of whole files, as "
            "`model_signing sign key` does"
        )
    digests = {resource.name: resource.digest for resource in resources}
    if len(digests) != len(resources):
        raise SignatureError("cannot use the signature: it lists a file twice")
    return digests


def _base64(text: str, field: str) -> bytes:
    try:
        return binascii.a2b_base64(text.encode(), strict_mode=True)
    except (binascii.Error, UnicodeError) as error:
        raise SignatureError(f"cannot read the signature: {field} is not base64") from error


def _unknown_key(bundle: _Bundle) -> str:
    """Return how to name the key that a bundle says it was made with."""
    key = bundle.verification_material.public_key
    hint = key.hint if key is not None else ""
    return f"key {hint[:KEY_DIGITS]!r}" if hint else "no key"
