"""`isochrone models add --signature` on a scheduler with `model_signers`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.admin.conftest import Admin
from tests.integration.admin.test_cli import run_cli
from tests.unit.service.test_model_signature import a_key, a_model, sign


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"model_signers": (a_key(tmp_path, "acme").with_suffix(".pub"),)}


async def test_only_a_signed_model_can_be_added(admin: Admin, tmp_path: Path) -> None:
    model = a_model(tmp_path)
    add = ("models", "add", "m", "--source", f"file:{model}", "--architecture", "x")
    code, _, err = await run_cli(admin, *add)
    assert (code, "it is not signed; expected a signature of acme" in err) == (1, True), err
    foreign = sign(model, a_key(tmp_path, "other"))
    code, _, err = await run_cli(admin, *add, "--signature", str(foreign))
    assert (code, "no trusted key has made its signature" in err) == (1, True), err
    (model / "notes").write_text("not what was signed")
    code, _, err = await run_cli(admin, *add, "--signature", str(foreign))
    assert (code, "model.sig: cannot use file:" in err, "'notes' is not signed" in err) == (
        *(1, True, True),
    ), err
    signature = sign(model, tmp_path / "acme.key")
    code, _, err = await run_cli(admin, *add, "--signature", str(signature))
    assert (code, "signed by acme" in err) == (0, True), err
    code, out, _ = await run_cli(admin, "-o", "json", "models", "list")
    (row,) = json.loads(out)
    assert (row["signed_by"], len(row["artifact"]["files"])) == ("acme", 3)
    code, out, _ = await run_cli(admin, "models", "show", "m")
    assert ("acme" in out, "dsseEnvelope" in out) == (True, False)
    code, out, _ = await run_cli(admin, "-o", "json", "models", "show", "m")
    assert json.loads(out)["signed_by"] == "acme"
    assert (await run_cli(admin, "models", "show", "none"))[0] == 1


async def test_a_signature_that_is_new_makes_a_new_version(admin: Admin, tmp_path: Path) -> None:
    model = a_model(tmp_path)
    signature = sign(model, tmp_path / "acme.key")
    add = ("models", "add", "m", "--source", f"file:{model}", "--architecture", "x")
    add_signed = (*add, "--signature", str(signature))

    async def version() -> int:
        out = (await run_cli(admin, "-o", "json", "deployments", "show", "d"))[1]
        return int(json.loads(out)["version"])

    assert (await run_cli(admin, *add_signed))[0] == 0
    deploy = ("deploy", "d", "--model", "m", "--driver", "mock")
    assert (await run_cli(admin, *deploy))[0] == 0
    assert (await run_cli(admin, *add_signed))[0] == 0
    assert await version() == 1
    sign(model, tmp_path / "acme.key")  # ECDSA draws a number: no two signatures are the same.
    assert (await run_cli(admin, *add_signed))[0] == 0
    assert await version() == 2
