"""The operator's command `isochrone`. Exit codes: 0 success, 1 refused or failed, 2 wrong usage."""

import tomllib
from pathlib import Path
from typing import Any, Final

import click

from isochrone import __version__
from isochrone.cli import access, adapters, fleet, models, planning, rollouts, serving, tenants
from isochrone.cli.chat import ChatFailed
from isochrone.cli.client import AdminClient, AdminError
from isochrone.cli.context import CliContext
from isochrone.cli.manifest import ManifestError

CONFIG_FILE: Final = Path("~/.config/isochrone/config.toml")
OUTPUT_FORMAT: Final = click.Choice(["table", "json"])


class CommandGroup(click.Group):
    """A command group that prints expected errors as messages and exits with code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raises click.ClickException."""
        try:
            return super().invoke(ctx)
        except (AdminError, ManifestError, ChatFailed) as error:
            raise click.ClickException(str(error)) from error


def _from_config_file(name: str) -> str:
    path = CONFIG_FILE.expanduser()
    if not path.exists():
        return ""
    try:
        return str(tomllib.loads(path.read_text()).get(name, ""))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"cannot read {path}: {error}") from error


@click.group(cls=CommandGroup)
@click.option(
    "--url",
    envvar="ISOCHRONE_ADMIN_URL",
    help="Admin API URLs, such as https://host:7000, separated by commas.",
)
@click.option("--token", envvar="ISOCHRONE_ADMIN_TOKEN", help="Admin API token.")
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FORMAT,
    default="table",
    show_default=True,
    help="Output format.",
)
@click.version_option(__version__)
@click.pass_context
def main(ctx: click.Context, url: str | None, token: str | None, output: str) -> None:
    """Operate an Isochrone fleet: LLM inference in many cities.

    --url and --token can be set in ISOCHRONE_ADMIN_URL and ISOCHRONE_ADMIN_TOKEN, or as `url` and
    `token` in ~/.config/isochrone/config.toml.
    """
    url = url or _from_config_file("url") or "http://127.0.0.1:7000"
    ctx.obj = CliContext(AdminClient(url, token or _from_config_file("token")), output)


def _set_output(ctx: click.Context, _: click.Parameter, output: str | None) -> None:
    if output is not None:
        ctx.obj = ctx.obj._replace(output=output)


def _with_output(command: click.Command) -> click.Command:
    """Accept `-o` after a command, too, because many users type it there."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _with_output(inner)
    if not isinstance(command, click.Group) or command.invoke_without_command:
        option = click.Option(
            ["-o", "--output"],
            type=OUTPUT_FORMAT,
            expose_value=False,
            callback=_set_output,
            help="Output format.",
        )
        command.params.append(option)
    return command


for command in (
    fleet.status,
    fleet.pops,
    fleet.nodes,
    fleet.routers,
    fleet.revoke,
    fleet.revocations,
    models.models,
    serving.deploy,
    serving.deployments,
    serving.engines,
    serving.placements,
    serving.explain,
    planning.plan,
    rollouts.rollouts,
    access.keys,
    tenants.tenants,
    adapters.adapters,
    access.usage,
    access.events,
    access.chat,
):
    main.add_command(_with_output(command))


if __name__ == "__main__":
    main()
