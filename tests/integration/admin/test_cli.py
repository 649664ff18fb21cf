"""The command `isochrone` against a real admin API."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from isochrone import __version__
from isochrone.cli.main import main
from tests.integration.admin.conftest import TOKEN, Admin
from tests.integration.router.catalogue import add_deployment
from tests.integration.router.test_finetunes import add_deployments


def env_of(admin: Admin, token: str) -> dict[str, str]:
    return {"ISOCHRONE_ADMIN_URL": admin.url, "ISOCHRONE_ADMIN_TOKEN": token, "NO_COLOR": "1"}


async def run_cli(admin: Admin, *arguments: str, token: str = TOKEN) -> tuple[int, str, str]:
    """Run the command and return (exit code, standard output, standard error)."""
    env = env_of(admin, token)
    result = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=env)
    return result.exit_code, result.stdout, result.stderr


async def limit_a_tenant(admin: Admin) -> None:
    """Set, change, list and end a tenant's budget."""
    limit = ("-o", "json", "tenants", "limit", "acme")
    code, out, _ = await run_cli(admin, *limit, "--tokens-per-month", "1000")
    assert (code, json.loads(out)["limits"]["tokens_per_month"]) == (0, 1000)
    code, out, _ = await run_cli(admin, *limit, "--spend-per-day", "2.5")
    changed = json.loads(out)["limits"]
    assert (changed["tokens_per_month"], changed["spend_per_day"]) == (1000, 2.5)
    code, out, _ = await run_cli(admin, "-o", "json", "tenants", "list")
    assert [(row["tenant_id"], row["tokens_today"]) for row in json.loads(out)] == [("acme", 0)]
    row = (await run_cli(admin, "tenants", "list"))[1].splitlines()[1]
    assert row.startswith("acme ")
    assert row.endswith("  spend_per_day=2.5, tokens_per_month=1000"), "0 is no limit"
    assert len(json.loads((await run_cli(admin, "-o", "json", "keys", "list"))[1])) == 1
    assert (await run_cli(admin, "tenants", "limit", "acme"))[0] == 2
    code, _, err = await run_cli(admin, "tenants", "limit", "No Name", "--concurrency", "1")
    assert (code, "cannot limit tenant 'No Name'" in err) == (1, True)
    code, _, err = await run_cli(admin, "tenants", "limit", "acmee", "--concurrency", "1")
    assert (code, "use one of acme" in " ".join(err.replace("│", " ").split())) == (1, True), err
    assert len(json.loads((await run_cli(admin, "-o", "json", "tenants", "list"))[1])) == 1
    new = ("tenants", "limit", "acmee", "--new", "--concurrency", "1")
    assert (await run_cli(admin, *new))[0] == 0
    assert (await run_cli(admin, *new[:3], *new[4:]))[0] == 0, "it has a budget now"
    assert (await run_cli(admin, "tenants", "unlimit", "acmee"))[0] == 0
    path = "/v1/tenants/acme/limits?new="
    assert (await admin.ask("PUT", path + "maybe", {"concurrency": 1})).status == 400
    assert (await admin.ask("PUT", path + "false", {"concurrency": 0})).status == 200
    assert (await run_cli(admin, "tenants", "unlimit", "acme"))[0] == 0
    code, _, err = await run_cli(admin, "tenants", "unlimit", "acme")
    assert (code, "cannot find" in err) == (1, True)
    assert "tenant.unlimit" in (await run_cli(admin, "events", "--limit", "1"))[1]


async def test_an_operator_sets_up_a_fleet(admin: Admin, tmp_path: Path) -> None:
    place = ("--city", "Amsterdam", "--country", "NL", "--latitude", "52", "--longitude", "4")
    assert (await run_cli(admin, "pops", "add", "ams", *place))[0] == 0
    code, out, _ = await run_cli(admin, "nodes", "join-token", "ams")
    assert code == 0
    assert out.startswith("ij1_")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.gguf").write_bytes(b"GGUF")
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config = {**sizes, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    source = f"file:{tmp_path / 'model'}"
    with_price = ("models", "add", "m", "--source", source, "--price", "0.5:2")
    code, out, err = await run_cli(admin, *with_price, "-o", "json")
    assert (code, json.loads(out)["model"]["model_id"]) == (0, "m")
    assert "architecture LlamaForCausalLM: read from its files" in err
    assert "kind chat: read from its files" in err
    code, out, _ = await run_cli(admin, "-o", "json", "models", "list")
    assert (await run_cli(admin, "models", "list", "-o", "json"))[1] == out
    (model,) = json.loads(out)
    assert [file["path"] for file in model["artifact"]["files"]] == ["config.json", "m.gguf"]
    assert (model["shape"]["layers"], model["shape"]["kv_heads"]) == (2, 2)
    assert model["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert model["price"] == {
        "prompt_per_million": 0.5,
        "output_per_million": 2.0,
        "cached_per_million": None,
    }
    code, out, _ = await run_cli(
        admin, "-o", "json", "deploy", "chat", "--model", "m", "--driver", "mock", "--min", "2"
    )
    assert code == 0
    created = json.loads(out)
    assert created["policy"]["replicas_min"] == 2
    code, out, _ = await run_cli(admin, "-o", "json", "deploy", "chat", "--max", "7")
    changed = json.loads(out)
    assert changed["policy"] == {**created["policy"], "replicas_max": 7}
    assert changed["version"] == created["version"]
    code, out, _ = await run_cli(admin, "explain", "deployment", "chat")
    assert "there is no node" in out
    code, out, _ = await run_cli(admin, "keys", "create", "acme", "--tokens-per-min", "1000")
    assert out.startswith("iso_")
    code, out, _ = await run_cli(admin, "-o", "json", "keys", "list")
    (key,) = json.loads(out)
    assert (key["tenant_id"], key["limits"]["tokens_per_min"]) == ("acme", 1000)
    limit = ("keys", "limit", key["key_id"], "--concurrency", "3", "--spend-per-day", "0.5")
    code, out, _ = await run_cli(admin, "-o", "json", *limit)
    assert json.loads(out)["limits"] == {
        **key["limits"],
        "concurrency": 3,
        "spend_per_day": 0.5,
    }
    code, out, err = await run_cli(admin, "events", "--subject", "chta")
    assert (code, out.split()) == (0, ["AT", "ACTOR", "KIND", "SUBJECT", "REASON"])
    assert "no event of 'chta' is kept" in err
    code, out, err = await run_cli(admin, "events", "--subject", "chat")
    assert ("deployment.create" in out, err) == (True, "")
    code, out, _ = await run_cli(admin, "events", "--limit", "3")
    assert "key.limit" in out
    await limit_a_tenant(admin)
    told = (await run_cli(admin, "status"))[1]
    assert "s1" in told
    assert __version__ in told
    for listing in (
        "pops list",
        "nodes list",
        "routers",
        "routers list",
        "deployments list",
        "placements",
    ):
        assert (await run_cli(admin, *listing.split()))[0] == 0


async def test_omitted_options_keep_their_values_and_empty_ones_are_removed(
    admin: Admin, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"GGUF")
    place = {"city": "Paris", "country": "FR", "latitude": 48.9, "longitude": 2.4}
    assert (await admin.ask("PUT", "/v1/pops/cdg", place)).status == 200
    code, _, err = await run_cli(admin, "models", "add", "m", "--source", f"file:{tmp_path}")
    assert code == 0, err

    async def deployed(*arguments: str) -> dict[str, Any]:
        code, out, err = await run_cli(admin, "-o", "json", "deploy", "chat", *arguments)
        assert code == 0, err
        return dict(json.loads(out))

    created = await deployed(
        *("--model", "m", "--driver", "mock", "--option", "itl_ms=5", "--option", "sequences=1"),
        *("--keep-warm", "cdg", "--allow", "FR", "--priority", "80"),
    )
    assert created["policy"]["priority"] == 80
    changed = await deployed("--option", "sequences=", "--option", "ttft_ms=9", "--allow", "")
    assert changed["engine"] == {**created["engine"], "options": {"itl_ms": "5", "ttft_ms": "9"}}
    assert changed["policy"] == {**created["policy"], "allow": []}
    code, _, err = await run_cli(admin, "deploy", "chat", "--option", "itl-ms=5")
    assert code != 0
    assert "mock: unknown option 'itl-ms'; did you mean 'itl_ms'?" in err


async def test_errors_go_to_standard_error_with_an_exit_code(admin: Admin) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "isochrone.cli.main", "status"),
        env={**os.environ, **env_of(admin, "wrong")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out_bytes, err_bytes = await process.communicate()
    assert (process.returncode, out_bytes) == (1, b"")
    assert b"cannot authenticate: the admin token is wrong" in err_bytes
    assert b"ISOCHRONE_ADMIN_TOKEN" in err_bytes
    _, _, err = await run_cli(admin, "--token", "iso_34nln12971bv_x", "status")
    assert "this is the admin API; a client's key is for routers" in err
    unreachable, reachable = "http://127.0.0.1:1", admin.url
    assert (await run_cli(admin, "--url", f"{unreachable}, {reachable}", "status"))[0] == 0
    code, _, err = await run_cli(admin, "--url", unreachable, "status")
    assert code == 1
    assert f"cannot reach the admin API at {unreachable}: Connection refused" in err
    assert "ISOCHRONE_ADMIN_URL" in err
    code, _, err = await run_cli(admin, "--url", "10.0.0.5:7000", "status")
    assert (code, "cannot use admin API URL '10.0.0.5:7000'" in err) == (1, True)
    chat = ("chat", "m", "hello", "--endpoint", "10.0.0.5:8080", "--key", "iso_x")
    code, _, err = await run_cli(admin, *chat)
    assert (code, "cannot use endpoint '10.0.0.5:8080'" in err) == (1, True)
    code, _, err = await run_cli(admin, "plan", "--save", "/proc/nowhere/fleet.json")
    assert (code, "cannot write /proc/nowhere/fleet.json: No such file" in err) == (1, True)
    code, _, err = await run_cli(admin, "keys", "create", "acme", "--deployment", "nobody")
    assert (code, "cannot find the deployment 'nobody'" in err) == (1, True)
    assert "shows the ids, and the names that only clients use" in err
    assert (await run_cli(admin, "keys", "create", "acme", "--ttl", "0"))[0] == 1
    code, _, err = await run_cli(admin, "keys", "create", "acme", "--ttl", "1 hour")
    assert (code, "cannot read the duration '1 hour'" in err) == (2, True)
    code, _, err = await run_cli(admin, "nodes", "drain", "nobody")
    assert code == 1
    assert "cannot find the node 'nobody'" in err
    code, _, err = await run_cli(admin, "deploy")
    assert code == 2
    code, _, err = await run_cli(admin, "deploy", "new")
    assert code == 2
    assert "give --model" in err
    code, _, err = await run_cli(admin, "deploy", "new", "--model", "m", "--option", "graphs")
    assert code == 2
    assert "cannot read option 'graphs'" in err


async def test_a_key_for_regions_without_a_kept_replica_gets_a_note(admin: Admin) -> None:
    await admin.pop("ams", "NL")
    await admin.pop("sin", "SG")
    await add_deployments(admin)
    create = ("keys", "create", "acme", "--region", "SG", "--deployment", "plain")
    code, out, err = await run_cli(admin, *create)
    assert (code, out.startswith("iso_")) == (0, True)
    assert "While sin has none of plain, its requests get 503" in " ".join(err.split())
    warm = await run_cli(admin, "deploy", "plain", "--keep-warm", "sin")
    assert warm[0] == 0, warm[2]
    assert (await run_cli(admin, *create))[2] == ""
    assert (await run_cli(admin, "keys", "create", "acme"))[2] == ""


async def test_a_limit_of_spend_names_the_models_that_it_does_not_limit(admin: Admin) -> None:
    await add_deployment(admin, "tiny", "mock", "tiny")
    create = ("keys", "create", "acme")
    code, out, err = await run_cli(admin, *create, "--spend-per-month", "5")
    assert (code, out[:4], "does not limit tiny: set a price" in err) == (0, "iso_", True)
    limit = ("tenants", "limit", "acme")
    assert "does not limit tiny" in (await run_cli(admin, *limit, "--spend-per-day", "5"))[2]
    assert (await run_cli(admin, *limit, "--tokens-per-day", "5"))[2] == ""
    assert (await run_cli(admin, *limit, "--spend-per-day", "0"))[2] == ""
    model = (await admin.ask("GET", "/v1/models/tiny")).body["model"]
    priced = {**model, "price": {"prompt_per_million": 1.0, "output_per_million": 2.0}}
    assert (await admin.ask("PUT", "/v1/models/tiny", priced)).status == 200
    assert (await run_cli(admin, *limit, "--spend-per-day", "5"))[2] == ""
