"""What a driver knows of its engine: how it is started, where it is asked, what its words mean."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from isochrone.wire.assignment import ReplicaSpec
from isochrone.wire.engine import EngineStats


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is started for, and with what."""

    spec: ReplicaSpec
    model_path: Path
    folder: Path
    port: int
    threads: int


class EngineCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start: its arguments, environment and files, and where it will answer.

    `base_url` is `http://localhost` with `socket`, or `http://127.0.0.1:port`. It is empty for a
    part that another node leads: that leaves a file at `socket`, if one is given, once all have
    met. `standby` starts a process that waits to become such an engine; it is `arguments` up to
    their first option, and `--standby`.
    """

    arguments: tuple[str, ...]
    base_url: str
    socket: str = ""
    environment: dict[str, str] = {}
    files: dict[str, bytes] = {}
    standby: tuple[str, ...] = ()


CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UnknownOption(Exception):
    """The deployment gives an option that this driver does not have."""


class EngineDriver(Protocol):
    """One engine's driver."""

    health_path: str
    stats_path: str
    metrics_path: str
    resumes: str
    """What of a broken answer it goes on from: greedy draws, seeded ones too, or nothing ("")."""
    salted: frozenset[str]
    """The paths whose bodies take a `cache_salt`; an engine of ours reads its header."""

    def lacks(self) -> str:
        """Say without what here no such engine can start; "" if it can. Blocking."""
        ...

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the process to start, or raise UnknownOption."""
        ...

    def read_stats(self, body: bytes) -> EngineStats:
        """Read the engine's own account of its load."""
        ...


def no_program(name: str) -> str:
    """Say that a program is not here; "" if it is."""
    return "" if shutil.which(name) else f"{name} is not on the PATH of the agent"


def no_package(name: str) -> str:
    """Say that a package is not here; "" if it is."""
    return "" if find_spec(name) else f"{name} is not installed beside the agent"


def on_one_node(spec: ReplicaSpec, why: str) -> None:
    """Raise UnknownOption where a replica is to be over several nodes."""
    if spec.group is not None:
        driver, nodes = spec.engine.driver, spec.group.nodes
        raise UnknownOption(f"cannot start {driver} over {nodes} nodes: {why}")


def check_options(spec: ReplicaSpec, known: frozenset[str]) -> None:
    """Raise UnknownOption where a deployment gives what the driver does not have."""
    unknown = sorted(set(spec.engine.options) - known)
    if unknown:
        raise UnknownOption(
            f"cannot start {spec.engine.driver}: unknown options {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def with_salt(body: bytes, salt: str) -> bytes:
    """Return a request with its tenant's salt, whatever the client wrote there.

    What one tenant's prompts left in an engine's cache must serve, and show, in no other's.
    """
    try:
        fields: dict[str, Any] = _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        # The engine says so in better words.
        return body
    return msgspec.json.encode({**fields, "cache_salt": salt})


def visible_devices(spec: ReplicaSpec) -> dict[str, str]:
    """Return the environment that shows an engine its own GPUs and no others."""
    gpus = [device.removeprefix("gpu") for device in spec.device_ids if device != "cpu"]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def flags(options: Mapping[str, str]) -> tuple[str, ...]:
    """Write options as `--name value`; an empty value is a flag alone."""
    written: list[str] = []
    for name, value in sorted(options.items()):
        written.append(f"--{name.replace('_', '-')}")
        if value:
            written.append(value)
    return tuple(written)


def read_prometheus(body: bytes) -> dict[str, float]:
    """Return the sum of each metric's samples, labels aside; those that are no number left out."""
    sums: dict[str, float] = {}
    for line in body.decode(errors="replace").splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, told = line.rpartition(" ")
        name = name.partition("{")[0]
        with suppress(ValueError):
            value = float(told)
            if isfinite(value):
                sums[name] = sums.get(name, 0.0) + value
    return sums
