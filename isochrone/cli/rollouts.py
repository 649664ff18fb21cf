"""Commands for rollouts: start one, watch it, pause, resume or abort it."""

from typing import Any, Final

import click

from isochrone.cli.client import segment
from isochrone.cli.context import CliContext
from isochrone.cli.engine import engine_of, engine_options
from isochrone.cli.output import show_one, show_rows
from isochrone.cli.simple_commands import add_command


@click.group()
def rollouts() -> None:
    """Manage gradual rollouts of new versions."""


@rollouts.command("start")
@click.argument("deployment")
@click.option("--model", help="The catalogue entry of the new version.")
@engine_options
@click.option(
    "--step",
    "steps",
    multiple=True,
    help="Percent of requests, or PERCENT@POP,POP; repeat it (default 1, 5, 25, 100).",
)
@click.option("--attempts", type=int, help="Fewest attempts to judge a step by.")
@click.option("--step-seconds", type=float, help="Shortest duration of a step.")
@click.pass_obj
def rollouts_start(obj: CliContext, /, deployment: str, **given: Any) -> None:
    """Start a rollout. What is not given stays as the deployment has it."""
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
        body["steps"] = [_step(text) for text in given["steps"]]
    show_one(obj.api.ask("POST", f"{path}/rollouts", body), obj.output)


@rollouts.command("list")
@click.option("--deployment")
@click.pass_obj
def rollouts_list(obj: CliContext, deployment: str | None) -> None:
    """List rollouts."""
    query = {"deployment_id": deployment} if deployment else None
    columns = ["rollout_id", "from_version", "to_version", "state", "step", "reason"]
    show_rows(obj.api.list("/v1/rollouts", query), columns, obj.output)


def _step(text: str) -> dict[str, Any]:
    percent, _, pops = text.partition("@")
    try:
        share = float(percent.removesuffix("%")) / 100
        if not 0 < share <= 1:
            raise ValueError(text)
    except ValueError as error:
        raise click.UsageError(
            f"cannot read the step {text!r}: give a percentage, as 5 or 5@ams,fra"
        ) from error
    return {"share": share, "pops": [pop for pop in pops.split(",") if pop]}


ROLLOUT: Final = "/v1/rollouts/{rollout}"
add_command(rollouts, "show", "GET", ROLLOUT, "Show a rollout and its measurements.")
add_command(
    rollouts, "pause", "POST", f"{ROLLOUT}/pause",
    "Pause a rollout at its step. It still reverts if the new version does harm.", "{} is {state}",
)  # fmt: skip
add_command(
    rollouts, "resume", "POST", f"{ROLLOUT}/resume", "Resume a paused rollout.", "{} is {state}"
)
add_command(
    rollouts, "abort", "POST", f"{ROLLOUT}/abort",
    "Abort a rollout: every request goes to the old version.", "{} is {state}",
)  # fmt: skip
