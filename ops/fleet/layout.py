"""The demo's addresses, folders and configuration files."""

import hashlib
import os
from pathlib import Path
from typing import Final

from ops.fleet.cities import CITIES, City

ROOT: Final = Path(__file__).parents[2]
STATE: Final = ROOT / ".state" / "fleet"

SCHEDULER_HOST: Final = "127.20.0.5"
ADMIN_PORT: Final = 7000
CONTROL_PORT: Final = 7001
ROUTER_PORT: Final = 8080
NODE_PORT: Final = 9000

SOCKET_PATH_MAX: Final = 90
NODE_MEMORY_BYTES: Final = 3 * 1024**3


def admin_url() -> str:
    """Return the URL of the admin API."""
    return f"http://{SCHEDULER_HOST}:{ADMIN_PORT}"


def control_url() -> str:
    """Return the URL of the control port, to which agents and routers connect."""
    return f"http://{SCHEDULER_HOST}:{CONTROL_PORT}"


def endpoint(city: City) -> str:
    """Return the URL of a city's router."""
    return f"http://{city.router_host}:{ROUTER_PORT}"


def addresses() -> list[tuple[str, int]]:
    """Return all (host, port) pairs on which the demo listens."""
    listens = [(SCHEDULER_HOST, ADMIN_PORT), (SCHEDULER_HOST, CONTROL_PORT)]
    for city in CITIES:
        listens += [
            (city.router_host, ROUTER_PORT),
            (city.node_host, NODE_PORT),
            (city.listen_host, NODE_PORT),
        ]
    return listens


def database_folder(state: Path) -> Path:
    """Return a folder for Postgres: below `state` if possible, else below /var/tmp.

    As root, Postgres runs as another user, which needs access to every parent folder. The path of
    its Unix socket must be short.
    """
    folder = state / "postgres"
    state.mkdir(parents=True, exist_ok=True)
    is_accessible = os.geteuid() != 0 or all(
        p.stat().st_mode & 0o001 for p in (state, *state.parents)
    )
    if is_accessible and len(str(folder)) <= SOCKET_PATH_MAX:
        return folder
    name = hashlib.sha256(str(state).encode()).hexdigest()[:12]
    return Path("/var/tmp") / f"isochrone-{os.geteuid()}-{name}"  # noqa: S108 - made 0700


def scheduler_config(state: Path, database_url: str) -> str:
    """Return the scheduler's configuration (TOML)."""
    return f"""\
name = "scheduler-1"
database_url = "{database_url}"
authority = "{state}/authority"
admin_token_file = "{state}/admin.token"
admin_host = "{SCHEDULER_HOST}"
admin_port = {ADMIN_PORT}
control_host = "{SCHEDULER_HOST}"
control_port = {CONTROL_PORT}
batch_folder = "{state}/batches"
place_interval_s = 2.0
"""


def node_config(state: Path, city: City) -> str:
    """Return a node agent's configuration (TOML)."""
    return f"""\
name = "{city.pop}-1"
schedulers = ["{control_url()}"]
state = "{state}/node-{city.pop}"
address = "http://{city.node_host}:{NODE_PORT}"
listen_host = "{city.listen_host}"
listen_port = {NODE_PORT}
join_token_file = "{state}/node-{city.pop}.token"
cpu_memory_bytes = {NODE_MEMORY_BYTES}
drain_timeout_s = 5.0
"""


def router_config(state: Path, city: City) -> str:
    """Return a router's configuration (TOML)."""
    return f"""\
name = "router-{city.pop}"
schedulers = ["{control_url()}"]
state_folder = "{state}/router-{city.pop}"
join_token_file = "{state}/router-{city.pop}.token"
host = "{city.router_host}"
port = {ROUTER_PORT}
source_address = "{city.router_host}"
processes = 1
demand_interval_s = 2.0
drain_timeout_s = 5.0
"""
