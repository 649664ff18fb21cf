"""Commands for rollouts: start, list, show, pause, resume, abort."""

from typing import Any, Final

import click

from isochrone.cli.client import segment
from isochrone.cli.context import CliContext
from isochrone.cli.engine import engine_of, engine_options
from isochrone.cli.output import show_one, show_rows
from isochrone.cli.simple_commands import add_command, list_of_deployment


@click.group()
def rollouts() -> None:
    """Manage gradual rollouts of new versions."""


@rollouts.command("start")
@click.argument("deployment")
@click.option("--model", help="Model of the new version (default: unchanged).")
@engine_options
@click.option(
    "--step",
    "steps",
    multiple=True,
    help="Percent of requests, or PERCENT@POP,POP; repeatable (default: 1, 5, 25, 100).",
)
@click.option(
    "--attempts",
    type=click.IntRange(min=20),
    help="Minimum attempts of the new version per step.",
)
@click.option("--step-seconds", type=float, help="Minimum duration of a step.")
@click.pass_obj
def rollouts_start(obj: CliContext, /, deployment: str, **given: Any) -> None:
    """Start a rollout. Options that are not given keep the deployment's values."""
    path = f"/v1/deployments/{segment(deployment)}"
    before = obj.api.ask("GET", path)["engine"]
    bounds = {"attempts_min": given["attempts"], "step_min_s": given["step_seconds"]}
    body: dict[str, Any] = {
        "engine": engine_of(before, given),
        "bounds": {name: value for name, value in bounds.items() if value is not None},
    }
    if given["model"]:
        body["model_id"] = given["model"]
    if given["steps"]:
        body["steps"] = [_parse_step(text) for text in given["steps"]]
    show_one(obj.api.ask("POST", f"{path}/rollouts", body), obj.output)


@rollouts.command("list")
@click.option("--deployment", help="Only rollouts of this deployment.")
@click.pass_obj
def rollouts_list(obj: CliContext, deployment: str | None) -> None:
    """List rollouts."""
    columns = ["rollout_id", "from_version", "to_version", "state", "step", "reason"]
    show_rows(list_of_deployment(obj, "/v1/rollouts", deployment), columns, obj.output)


def _parse_step(text: str) -> dict[str, Any]:
    percent, _, pops = text.partition("@")
    try:
        share = float(percent.removesuffix("%")) / 100
        if not 0 < share <= 1:
            raise ValueError(text)
    except ValueError as error:
        raise click.UsageError(
            f"cannot read step {text!r}: write a percentage such as 5 or 5@ams,fra"
        ) from error
    return {"share": share, "pops": [pop for pop in pops.split(",") if pop]}


ROLLOUT: Final = "/v1/rollouts/{rollout}"
add_command(rollouts, "show", "GET", ROLLOUT, "Show a rollout and its measurements.")
add_command(
    rollouts, "pause", "POST", f"{ROLLOUT}/pause",
    "Pause a rollout at its step. It still reverts if the new version is worse.", "{} is {state}",
)  # fmt: skip
add_command(
    rollouts, "resume", "POST", f"{ROLLOUT}/resume", "Resume a paused rollout.", "{} is {state}"
)
add_command(
    rollouts, "abort", "POST", f"{ROLLOUT}/abort",
    "Abort a rollout: all requests go to the old version again.", "{} is {state}",
)  # fmt: skip
