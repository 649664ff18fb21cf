"""`python -m scheduler`: serve, migrate, plan a saved snapshot, or run an embedded Postgres.

Each command imports what it needs: the process that starts Postgres needs neither planner nor HTTP.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import NoReturn

import click
import msgspec

from isochrone.service.config import load_config
from isochrone.service.logs import setup_logs
from isochrone.service.run import run_service
from scheduler.embedded_postgres import EmbeddedPostgres, PostgresError

ENV_PREFIX = "ISOCHRONE_SCHEDULER_"


@click.group()
def main() -> None:
    """The scheduler of an Isochrone fleet."""


@main.command("serve")
@click.option("--config", type=click.Path(path_type=Path), help="TOML file.")
def serve_command(config: Path | None) -> NoReturn:
    """Run a scheduler. Of several on one database, one acts and the others stand by."""
    from scheduler.app import serve
    from scheduler.config import SchedulerConfig

    async def run(stopping: asyncio.Event) -> int:
        settings = load_config(SchedulerConfig, config, os.environ, ENV_PREFIX)
        setup_logs("scheduler", settings.log_level)
        return await serve(settings, stopping)

    run_service(run)


@main.command("migrate")
@click.option("--database-url", required=True, envvar=f"{ENV_PREFIX}DATABASE_URL")
def migrate_command(database_url: str) -> None:
    """Migrate a database to this release's schema."""
    from scheduler.store.migrate import MigrationError, migrate
    from scheduler.store.pool import CONNECT_ERRORS, open_pool

    async def run() -> list[str]:
        pool = await open_pool(database_url)
        try:
            return await migrate(pool)
        finally:
            await pool.close()

    try:
        applied = asyncio.run(run())
    except MigrationError as error:
        raise click.ClickException(str(error)) from error
    except CONNECT_ERRORS as error:
        raise click.ClickException(f"cannot use the database: {error}") from error
    click.echo("\n".join(applied) or "nothing to do")


@main.command("what-if")
@click.argument("snapshot", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--changes", default="[]", help="Changes as a JSON list.")
@click.option("--prices", default="{}", help="Price of a device per hour by device class, as JSON.")
def what_if_command(snapshot: Path, changes: str, prices: str) -> None:
    """Plan a saved snapshot after some changes, and print the result as JSON."""
    from scheduler.decide.whatif import Change, ClusterSnapshot, InvalidChange, what_if

    try:
        saved = msgspec.json.decode(snapshot.read_bytes(), type=ClusterSnapshot)
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise click.ClickException(f"cannot read the snapshot {snapshot}: {error}") from error
    try:
        parsed = msgspec.json.decode(changes, type=list[Change])
        outcome = what_if(saved, parsed, msgspec.json.decode(prices, type=dict[str, float]))
    except msgspec.DecodeError as error:
        raise click.ClickException(f"cannot read the changes: {error}") from error
    except InvalidChange as error:
        raise click.ClickException(str(error)) from error
    click.echo(msgspec.json.encode(outcome))


@main.command("postgres")
@click.option(
    "--state", type=click.Path(path_type=Path), required=True, help="Folder for its data."
)
@click.option("--pg-bin", type=click.Path(path_type=Path), help="Folder with postgres and initdb.")
def postgres_command(state: Path, pg_bin: Path | None) -> NoReturn:
    """Run an embedded Postgres in the foreground and print its database URL."""

    async def run(stopping: asyncio.Event) -> int:
        setup_logs("postgres")
        server = EmbeddedPostgres(state, pg_bin)
        await server.start()
        sys.stdout.write(f"{server.dsn}\n")
        sys.stdout.flush()
        ended = asyncio.create_task(server.wait())
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait((ended, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if ended.done():
            return 1
        ended.cancel()
        await server.stop()
        return 0

    try:
        run_service(run)
    except PostgresError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
