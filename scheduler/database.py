"""Opens this process's connections to Postgres, and checks that the database is its cluster's."""

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final, NamedTuple

from isochrone.service.config import ConfigError
from isochrone.service.failure_log import error_text
from isochrone.service.trust.identity import Authority
from isochrone.wire.ids import ClusterId
from scheduler.config import SchedulerConfig
from scheduler.store.lease import claim_authority, ensure_cluster
from scheduler.store.migrate import MigrationError, migrate
from scheduler.store.pool import CONNECT_ERRORS, Pool, open_pool, transaction

RESERVED_CONNECTIONS: Final = 2
INTAKE_CONNECTIONS: Final = 10
CLIENT_CONNECTIONS: Final = 16


class Database(NamedTuple):
    """The pools of one process, apart so that one kind of work does not wait for another."""

    pool: Pool
    """Periodic jobs and operators."""
    reserved: Pool
    """The lease and signs of life."""
    intake: Pool
    """Registrations, reports and usage, which a whole fleet may send at once."""
    clients: Pool
    """Requests that routers relay or make for clients: files, batches, responses, adapters."""
    cluster_id: ClusterId


@asynccontextmanager
async def open_database(config: SchedulerConfig, authority: Authority) -> AsyncIterator[Database]:
    """Open the pools, migrate, and check that the cluster's authority is ours."""
    async with AsyncExitStack() as pools:
        with _database_errors_as_config_errors():
            pool = await open_pool(config.database_url)
            # Terminated and not closed: closing waits for a database that may be unreachable.
            pools.callback(pool.terminate)
            reserved = await open_pool(config.database_url, size_max=RESERVED_CONNECTIONS)
            pools.callback(reserved.terminate)
            intake = await open_pool(config.database_url, size_max=INTAKE_CONNECTIONS)
            pools.callback(intake.terminate)
            clients = await open_pool(config.database_url, size_max=CLIENT_CONNECTIONS)
            pools.callback(clients.terminate)
            await migrate(pool)
            async with transaction(pool) as connection:
                cluster = await ensure_cluster(connection, ClusterId(f"c{secrets.token_hex(8)}"))
                fingerprint = await claim_authority(connection, authority.fingerprint)
        if fingerprint != authority.fingerprint:
            raise ConfigError(
                f"cannot start: {config.authority} holds the authority {authority.fingerprint[:16]}"
                f", the cluster's is {fingerprint[:16]}; copy the folder of a scheduler that has it"
                " (if none has, empty cluster.authority in the database and have every server join"
                " again)"
            )
        yield Database(pool, reserved, intake, clients, cluster.cluster_id)


@contextmanager
def _database_errors_as_config_errors() -> Iterator[None]:
    try:
        yield
    except MigrationError as error:
        raise ConfigError(str(error)) from error
    except CONNECT_ERRORS as error:
        raise ConfigError(
            f"cannot use the database: {getattr(error, 'strerror', None) or error_text(error)};"
            " check database_url"
        ) from error
