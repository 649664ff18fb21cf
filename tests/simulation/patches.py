"""Puts simulated clocks, connections and SQL in place of the real ones, for a block of code."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

import scheduler
from isochrone.service.clock import JumpFreeClock
from isochrone.service.trust import identity
from isochrone.service.trust.identity import Certificate, CertificateSubject
from isochrone.wire.ids import PopId
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.table_parts import split_table
from nodeagent.decide.replicas.reconcile import LackingParts
from tests.simulation import store_functions
from tests.simulation.event_loop import EPOCH, sim_monotonic, sim_utc_now
from tests.simulation.network import PART_BYTES_MAX, simulated_aiohttp
from tests.simulation.schedulers import ACCEPTED

FILES: ContextVar[dict[str, bytes]] = ContextVar("FILES")
"""The routers' snapshots, by path."""

LATER: Final = EPOCH + timedelta(days=3650)
OPEN_POOL: ContextVar[Any] = ContextVar("OPEN_POOL")


@contextmanager
def simulated() -> Iterator[pytest.MonkeyPatch]:
    """Run a block with everything simulated that the services take from the machine."""
    with pytest.MonkeyPatch.context() as patch:
        for module in pkgutil.walk_packages(scheduler.__path__, "scheduler."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        for function in store_functions.FUNCTIONS:
            replace_function(patch, function.__name__, function)
        for module_name in ("isochrone.service.loop", "scheduler.app", "nodeagent.app"):
            patch.setattr(f"{module_name}.monotonic", sim_monotonic)
        for module_name in (
            "isochrone.service.network.control_link",
            "scheduler.api.control.peers",
            "scheduler.loops.disconnect_revoked",
        ):
            patch.setattr(f"{module_name}.utc_now", sim_utc_now)
        patch.setattr("scheduler.app.JumpFreeClock", _clock)
        patch.setattr("isochrone.service.network.control_link.aiohttp", simulated_aiohttp())
        patch.setattr("scheduler.api.control.peers.ControlSocket", ACCEPTED.get)
        patch.setattr("scheduler.loops.renew_lease.open_pool", _open_pool)
        split = partial(split_table, bytes_max=PART_BYTES_MAX)
        patch.setattr("scheduler.state.published_routes.split_table", split)
        patch.setattr(identity, "verify_certificate", _verify_certificate)
        patch.setattr(identity, "verify_signature", lambda pem, payload, signed: signed == payload)
        patch.setattr(identity, "sign", lambda key, payload: payload)
        lacking = LackingParts({"mock": ""})
        patch.setattr("nodeagent.loops.converge.ConvergeJob._lacking_parts", lambda _: lacking)
        patch.setattr("nodeagent.supervisor.trim_log", lambda path: None)
        patch.setattr("nodeagent.supervisor.last_error", lambda path: "")
        snapshots = SimpleNamespace(read_snapshot=_read_snapshot, write_snapshot=_write_snapshot)
        patch.setattr("router.table_file.files", snapshots)
        yield patch


def replace_function(patch: pytest.MonkeyPatch, name: str, function: object) -> None:
    """Replace a function of `scheduler/store` in every module that has imported it."""
    holders = [
        module
        for module_name, module in sorted(sys.modules.copy().items())
        if module_name.startswith("scheduler.") and isfunction(vars(module).get(name))
    ]
    assert holders, name
    for module in holders:
        patch.setattr(module, name, function)


def _clock() -> JumpFreeClock:
    return JumpFreeClock(sim_utc_now, sim_monotonic)


async def _open_pool(url: str, *, size_max: int) -> Any:
    return OPEN_POOL.get()(size_max)


def _verify_certificate(pem: str, ca_pem: str, now: object) -> Certificate:
    role, name, pop = pem.split("/")
    return Certificate(CertificateSubject(PeerRole(role), name, PopId(pop)), name, EPOCH, LATER)


def _read_snapshot(path: Path) -> bytes | None:
    return FILES.get().get(str(path))


def _write_snapshot(path: Path, payload: Any) -> None:
    FILES.get()[str(path)] = payload if isinstance(payload, bytes) else b"".join(payload)
