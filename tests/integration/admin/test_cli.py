"""`isochrone` as an operator types it, against a real admin API."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from isochrone.cli.main import main
from tests.integration.admin.conftest import TOKEN, Admin


def env_of(admin: Admin, token: str) -> dict[str, str]:
    return {"ISOCHRONE_ADMIN_URL": admin.url, "ISOCHRONE_ADMIN_TOKEN": token, "NO_COLOR": "1"}


async def typed(admin: Admin, *arguments: str, token: str = TOKEN) -> tuple[int, str, str]:
    """Run the command and return (exit code, standard output, standard error)."""
    env = env_of(admin, token)
    done = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=env)
    return done.exit_code, done.stdout, done.stderr


async def test_an_operator_makes_a_fleet(admin: Admin, tmp_path: Path) -> None:
    place = ("--city", "Amsterdam", "--country", "NL", "--latitude", "52", "--longitude", "4")
    assert (await typed(admin, "pops", "add", "ams", *place))[0] == 0
    code, out, _ = await typed(admin, "nodes", "join-token", "ams")
    assert code == 0
    assert out.startswith("ij1_")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.gguf").write_bytes(b"GGUF")
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config = {**sizes, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    source = f"file:{tmp_path / 'model'}"
    priced = ("models", "add", "m", "--source", source, "--price", "0.5:2")
    assert (await typed(admin, *priced))[0] == 0
    code, out, _ = await typed(admin, "-o", "json", "models", "list")
    assert (await typed(admin, "models", "list", "-o", "json"))[1] == out
    (model,) = json.loads(out)
    assert [file["path"] for file in model["artifact"]["files"]] == ["config.json", "m.gguf"]
    assert (model["shape"]["layers"], model["shape"]["kv_heads"]) == (2, 2)
    assert model["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert model["price"] == {
        "prompt_per_million": 0.5,
        "output_per_million": 2.0,
        "cached_per_million": None,
    }
    code, out, _ = await typed(
        admin, "-o", "json", "deploy", "chat", "--model", "m", "--driver", "mock", "--min", "2"
    )
    assert code == 0
    made = json.loads(out)
    assert made["policy"]["replicas_min"] == 2
    code, out, _ = await typed(admin, "-o", "json", "deploy", "chat", "--max", "7")
    again = json.loads(out)
    assert again["policy"] == {**made["policy"], "replicas_max": 7}
    assert again["version"] == made["version"]
    code, out, _ = await typed(admin, "explain", "deployment", "chat")
    assert "there is no node" in out
    code, out, _ = await typed(admin, "keys", "create", "acme", "--tokens-per-min", "1000")
    assert out.startswith("iso_")
    code, out, _ = await typed(admin, "-o", "json", "keys", "list")
    (key,) = json.loads(out)
    assert (key["tenant_id"], key["limits"]["tokens_per_min"]) == ("acme", 1000)
    limit = ("keys", "limit", key["key_id"], "--concurrency", "3", "--spend-per-day", "0.5")
    code, out, _ = await typed(admin, "-o", "json", *limit)
    assert json.loads(out)["limits"] == {
        **key["limits"],
        "concurrency": 3,
        "spend_per_day": 0.5,
    }
    code, out, _ = await typed(admin, "events", "--limit", "3")
    assert "key.limit" in out
    assert "s1" in (await typed(admin, "status"))[1]
    for listing in ("pops list", "nodes list", "routers", "deployments list", "placements"):
        assert (await typed(admin, *listing.split()))[0] == 0


async def test_what_is_not_given_stays_and_what_is_given_empty_goes(
    admin: Admin, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    place = {"city": "Paris", "country": "FR", "latitude": 48.9, "longitude": 2.4}
    assert (await admin.ask("PUT", "/v1/pops/cdg", place)).status == 200
    await typed(admin, "models", "add", "m", "--source", f"file:{tmp_path}")

    async def deployed(*arguments: str) -> dict[str, Any]:
        code, out, err = await typed(admin, "-o", "json", "deploy", "chat", *arguments)
        assert code == 0, err
        return dict(json.loads(out))

    made = await deployed(
        *("--model", "m", "--driver", "mock", "--option", "itl_ms=5", "--option", "seed=1"),
        *("--keep-warm", "cdg", "--allow", "FR", "--priority", "80"),
    )
    assert made["policy"]["priority"] == 80
    again = await deployed("--option", "seed=", "--option", "ttft_ms=9", "--allow", "")
    assert again["engine"] == {**made["engine"], "options": {"itl_ms": "5", "ttft_ms": "9"}}
    assert again["policy"] == {**made["policy"], "allow": []}


async def test_what_is_refused_is_said_on_standard_error_with_its_exit_code(admin: Admin) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "isochrone.cli.main", "status"),
        env={**os.environ, **env_of(admin, "wrong")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        told, wrong = await process.communicate()
    assert (process.returncode, told) == (1, b"")
    assert b"cannot authenticate" in wrong
    assert b"ISOCHRONE_ADMIN_TOKEN" in wrong
    nobody, there = "http://127.0.0.1:1", admin.url
    assert (await typed(admin, "--url", f"{nobody}, {there}", "status"))[0] == 0
    code, _, err = await typed(admin, "--url", nobody, "status")
    assert code == 1
    assert f"cannot reach the admin API at {nobody}" in err
    code, _, err = await typed(admin, "--url", "10.0.0.5:7000", "status")
    assert (code, "cannot use '10.0.0.5:7000' as the admin API" in err) == (1, True)
    asked = ("chat", "m", "hello", "--endpoint", "10.0.0.5:8080", "--key", "iso_x")
    code, _, err = await typed(admin, *asked)
    assert (code, "cannot use '10.0.0.5:8080' as the endpoint" in err) == (1, True)
    code, _, err = await typed(admin, "plan", "--save", "/proc/nowhere/fleet.json")
    assert (code, "cannot write /proc/nowhere/fleet.json: No such file" in err) == (1, True)
    code, _, err = await typed(admin, "keys", "create", "acme", "--deployment", "nobody")
    assert (code, "cannot find the deployment 'nobody'" in err) == (1, True)
    assert (await typed(admin, "keys", "create", "acme", "--ttl", "0"))[0] == 1
    code, _, err = await typed(admin, "nodes", "drain", "nobody")
    assert code == 1
    assert "cannot find the node 'nobody'" in err
    code, _, err = await typed(admin, "deploy")
    assert code == 2
    code, _, err = await typed(admin, "deploy", "new")
    assert code == 2
    assert "needs --model" in err
    code, _, err = await typed(admin, "deploy", "new", "--model", "m", "--option", "graphs")
    assert code == 2
    assert "cannot read the option 'graphs'" in err
