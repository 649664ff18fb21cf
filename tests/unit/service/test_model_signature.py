"""Signatures of models, made by OpenSSF's own library and by hand, good and bad."""

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import model_signing
import msgspec
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from isochrone.cli.manifest import ManifestError, artifact_of, signed
from isochrone.service.config import ConfigError
from isochrone.service.trust.model_signature import (
    BUNDLE_TYPE,
    NO_SIGNERS,
    PAYLOAD_TYPE,
    PREDICATE_TYPE,
    STATEMENT_TYPE,
    ModelSigners,
    SignatureError,
    load_signers,
)
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import SIGNATURE_CHARS_MAX, Artifact, ArtifactFile

FILES: Final = {"vocab.txt": b"{}", "sub/w.safetensors": b"weights"}


def write_key(key: Any, path: Path) -> Path:
    """Write a private key, and its public key beside it."""
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(private)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    path.with_suffix(".pub").write_bytes(public)
    return path


def a_key(folder: Path, name: str, curve: ec.EllipticCurve | None = None) -> Path:
    return write_key(ec.generate_private_key(curve or ec.SECP256R1()), folder / f"{name}.key")


def a_model(folder: Path) -> Path:
    for name, body in FILES.items():
        path = folder / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return folder / "model"


def sign(model: Path, key: Path) -> Path:
    """Sign a folder as its publisher does, with OpenSSF's library."""
    path = model / "model.sig"
    config = model_signing.signing.Config().use_elliptic_key_signer(  # type: ignore[no-untyped-call]
        private_key=key
    )
    config.set_hashing_config(
        model_signing.hashing.Config().set_ignored_paths(paths=[path], ignore_git_paths=True)  # type: ignore[no-untyped-call]
    ).sign(model, path)
    return path


def with_signature(model: Path, path: Path) -> Artifact:
    return signed(artifact_of(model, f"file:{model}"), path)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_a_publishers_signature_names_its_key(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    model, key = a_model(tmp_path), a_key(tmp_path, "acme", curve)
    (model / ".gitattributes").write_text("not part of a model")
    (model / ".cache").mkdir()
    (model / ".cache" / "download").write_text("signed, and no part of the model")
    (model / "old.bin").write_bytes(b"a pickle: signed, and never part of a model")
    signature = sign(model, key)
    (model / "old.bin").unlink()
    artifact = with_signature(model, signature)
    assert {file.path for file in artifact.files} == set(FILES)
    other = a_key(tmp_path, "other")
    signers = load_signers([other.with_suffix(".pub"), key.with_suffix(".pub")])
    assert signers.signer(artifact) == "acme"
    with pytest.raises(SignatureError, match=r"no trusted key .* expected a signature of other"):
        load_signers([other.with_suffix(".pub")]).signer(artifact)


def test_the_files_must_be_those_that_were_signed(tmp_path: Path) -> None:
    model, key = a_model(tmp_path), a_key(tmp_path, "acme")
    signature, signers = sign(model, key), load_signers([key.with_suffix(".pub")])
    artifact = with_signature(model, signature)

    def refused(change: Callable[[dict[str, str]], object], reason: str) -> None:
        """Expect the refusal of the same signature over other files."""
        listed = {file.path: file.sha256 for file in artifact.files}
        change(listed)
        files = tuple(
            ArtifactFile(path=path, size_bytes=1, sha256=sha256) for path, sha256 in listed.items()
        )
        forged = msgspec.structs.replace(artifact, files=files, digest=manifest_digest(files))
        with pytest.raises(SignatureError, match=reason):
            signers.signer(forged)

    refused(lambda files: files.update({"vocab.txt": "0" * 64}), "'vocab.txt' differs")
    refused(lambda files: files.update({"extra.py": "0" * 64}), "'extra.py' is not signed")
    refused(lambda files: files.pop("vocab.txt"), "'vocab.txt' is missing")
    (model / "vocab.txt").write_bytes(b"{ }")
    with pytest.raises(ManifestError, match=r"'vocab\.txt' differs"):
        with_signature(model, signature)
    (model / "vocab.txt").write_bytes(FILES["vocab.txt"])
    (model / "new.txt").write_bytes(b"")
    with pytest.raises(ManifestError, match=r"'new\.txt' is not signed"):
        with_signature(model, signature)


def test_without_signers_nothing_is_required_and_an_unsigned_model_has_none() -> None:
    artifact = hand_made(files_of(FILES), "")
    assert not NO_SIGNERS.are_required
    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(SignatureError, match="it is not signed; expected a signature of acme"):
        ModelSigners({"acme": key.public_key()}).signer(artifact)


KEY: Final = ec.generate_private_key(ec.SECP256R1())


def files_of(bodies: dict[str, bytes]) -> tuple[ArtifactFile, ...]:
    return tuple(
        ArtifactFile(path=path, size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
        for path, body in bodies.items()
    )


def hand_made(files: tuple[ArtifactFile, ...], signature: str) -> Artifact:
    digest = manifest_digest(files)
    return Artifact(source="file:/m", files=files, digest=digest, signature=signature)


def statement() -> dict[str, Any]:
    resources = [
        {"name": file.path, "algorithm": "sha256", "digest": file.sha256}
        for file in files_of(FILES)
    ]
    return {
        "_type": STATEMENT_TYPE,
        "predicateType": PREDICATE_TYPE,
        "predicate": {"serialization": {"method": "files"}, "resources": resources},
    }


def bundle(payload: bytes) -> dict[str, Any]:
    """Sign a payload rightly, whatever it says."""
    pae = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)
    signature = KEY.sign(pae, ec.ECDSA(hashes.SHA256()))
    return {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": "ab" * 32}},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode()}],
        },
    }


def verify(signature: str) -> str:
    artifact = hand_made(files_of(FILES), signature)
    return ModelSigners({"acme": KEY.public_key()}).signer(artifact)


def test_a_signature_of_another_program_is_accepted() -> None:
    assert verify(json.dumps(bundle(json.dumps(statement()).encode()))) == "acme"


BAD_STATEMENTS: Final[dict[str, tuple[Callable[[dict[str, Any]], object], str]]] = {
    "another statement": (lambda s: s.update(_type="https://x/v1"), "it states https://x/v1"),
    "another predicate": (lambda s: s.update(predicateType="slsa"), "it states .*, slsa"),
    "no predicate": (lambda s: s.pop("predicate"), "missing required field `predicate`"),
    "shards": (lambda s: s["predicate"]["serialization"].update(method="shards"), "whole files"),
    "another hash": (
        lambda s: s["predicate"]["resources"][0].update(algorithm="md5"), "SHA-256 of whole files"
    ),
    "a file twice": (
        lambda s: s["predicate"]["resources"].append(s["predicate"]["resources"][0]), "twice"
    ),
    "another path": (
        lambda s: s["predicate"]["resources"][0].update(name="../vocab.txt"),
        "'vocab.txt' is not signed",
    ),
    "no files": (lambda s: s["predicate"].update(resources=[]), "is not signed"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_STATEMENTS)
def test_a_rightly_signed_statement_may_still_say_the_wrong_thing(case: str) -> None:
    change, reason = BAD_STATEMENTS[case]
    said = statement()
    change(said)
    with pytest.raises(SignatureError, match=reason):
        verify(json.dumps(bundle(json.dumps(said).encode())))


BAD_BUNDLES: Final[dict[str, tuple[Callable[[dict[str, Any]], object], str]]] = {
    "another type": (lambda b: b.update(mediaType="text/plain"), "its type is 'text/plain'"),
    "another payload": (
        lambda b: b["dsseEnvelope"].update(payloadType="application/json"),
        "its payload is 'application/json'",
    ),
    "no signature": (lambda b: b["dsseEnvelope"].update(signatures=[]), "it has 0 signatures"),
    "two": (
        lambda b: b["dsseEnvelope"].update(signatures=b["dsseEnvelope"]["signatures"] * 2),
        "it has 2 signatures",
    ),
    "no base64": (lambda b: b["dsseEnvelope"].update(payload="%%%"), "payload is not base64"),
    "a signature of nothing": (
        lambda b: b["dsseEnvelope"]["signatures"][0].update(sig=""), "no trusted key"
    ),
    "a changed byte": (
        lambda b: b["dsseEnvelope"].update(
            payload=base64.b64encode(json.dumps(statement()).encode() + b" ").decode()
        ),
        "no trusted key has made its signature, which names key 'abababababab'",
    ),
    "a certificate": (
        lambda b: b.update(verificationMaterial={"certificate": {"rawBytes": ""}}),
        "made with a certificate",
    ),
    "no envelope": (lambda b: b.pop("dsseEnvelope"), "missing required field `dsseEnvelope`"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_BUNDLES)
def test_a_bad_bundle_is_refused(case: str) -> None:
    change, reason = BAD_BUNDLES[case]
    made = bundle(json.dumps(statement()).encode())
    change(made)
    with pytest.raises(SignatureError, match=reason):
        verify(json.dumps(made))


def test_text_that_is_no_bundle_is_refused() -> None:
    deep = '{"x":' * 50_000 + "1" + "}" * 50_000
    for text in ("{}", "[]", "\ud800", "x" * (SIGNATURE_CHARS_MAX + 1), deep, "-----BEGIN"):
        with pytest.raises(SignatureError, match="cannot read the signature"):
            verify(text)
    for payload in (deep.encode(), b"\xff", b"[]", b""):
        with pytest.raises(SignatureError, match="cannot read what was signed"):
            verify(json.dumps(bundle(payload)))


def test_a_signer_must_be_the_public_key_of_a_curve(tmp_path: Path) -> None:
    key = a_key(tmp_path, "acme")
    (tmp_path / "other").mkdir()
    again = a_key(tmp_path / "other", "acme")
    weak = write_key(rsa.generate_private_key(65537, 2048), tmp_path / "rsa.key")
    koblitz = a_key(tmp_path, "koblitz", ec.SECP256K1())
    for paths, reason in (
        ([tmp_path / "none.pub"], "No such file"),
        ([key], "expected a public key in PEM"),
        ([weak.with_suffix(".pub")], "expected an elliptic curve key"),
        ([koblitz.with_suffix(".pub")], "expected an elliptic curve key"),
        ([key.with_suffix(".pub"), again.with_suffix(".pub")], "two files are named acme"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_signers(paths)
