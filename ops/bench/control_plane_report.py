"""Evaluates the control plane benchmark: CPU from /proc, latencies, a table in Markdown."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from os import sysconf
from pathlib import Path
from platform import python_version
from time import monotonic
from typing import Any, Final

import msgspec

from ops.bench.control_plane_fleet import MODELS
from ops.bench.control_plane_peers import SwarmLog

TICKS_PER_S: Final = sysconf("SC_CLK_TCK")
PAGE_BYTES: Final = sysconf("SC_PAGE_SIZE")
MIB: Final = 1024 * 1024


class ResourceWindow:
    """CPU and memory of a scheduler, its planner and its Postgres over a period."""

    def __init__(self, scheduler_pid: int, postgres_pid: int) -> None:
        self.cpu_shares: list[float] = []
        self.rss_mib: list[float] = []
        self.planner_rss_mib = [0.0]
        self.planner_share = self.postgres_share = 0.0
        self._pid = scheduler_pid
        self._postgres = postgres_pid

    async def watch(self, seconds: float) -> None:
        """Sample once a second."""
        began, deadline = monotonic(), monotonic() + seconds
        postgres_before, planner_before = _tree_s(self._postgres), _children_s(self._pid)
        before, at = _cpu_s(self._pid), began
        while monotonic() < deadline:
            await asyncio.sleep(1.0)
            now, cpu = monotonic(), _cpu_s(self._pid)
            self.cpu_shares.append((cpu - before) / (now - at))
            before, at = cpu, now
            self.rss_mib.append(_rss_mib(self._pid))
            self.planner_rss_mib += [_rss_mib(child) for child in _children(self._pid)]
        seconds = monotonic() - began
        self.postgres_share = (_tree_s(self._postgres) - postgres_before) / seconds
        self.planner_share = (_children_s(self._pid) - planner_before) / seconds


class MetricsGrowth:
    """The growth of a scheduler's metrics over a period: event loop lag, stalls and jobs."""

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        """Compare the metrics pages of the beginning and the end."""
        initial = _values(before)
        self._growth = {
            name: value - initial.get(name, 0.0) for name, value in _values(after).items()
        }

    def late_s(self, share: float) -> str:
        """Return the lag bucket that this share of the event loop's ticks is within."""
        prefix = "isochrone_scheduler_lag_seconds_bucket"
        total = self._growth.get("isochrone_scheduler_lag_seconds_count", 0.0)
        for name, count in self._growth.items():
            if name.startswith(prefix) and count >= share * total:
                return name.partition('"')[2].partition('"')[0]
        return "nan"

    def largest(self, metric: str, count: int, label: str = "") -> str:
        """Return the `count` largest series of a metric, each with its seconds."""
        rows = [
            (value, name.partition('"')[2].partition('"')[0])
            for name, value in self._growth.items()
            if name.startswith(f"isochrone_scheduler_{metric}{{") and label in name and value > 0
        ]
        return ", ".join(f"{name} {value:.1f}" for value, name in sorted(rows)[-count:][::-1])


def tables_sent(page: Sequence[str]) -> str:
    """Return how many tables a scheduler has sent with all keys, and with those missing."""
    name = "isochrone_scheduler_tables_sent_total"
    values = _values(page)
    counts = [values.get(f'{name}{{keys="{keys}"}}', 0.0) for keys in ("all", "missing")]
    return f"{counts[0]:.0f} / {counts[1]:.0f}"


def _values(page: Sequence[str]) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in page if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


class NewKey(msgspec.Struct, frozen=True):
    """A key: when it was created, and when the real router accepted it."""

    key_id: str
    made_at: float
    accepted_at: float


class ControlPlaneRun(msgspec.Struct, kw_only=True):
    """All measurements of a run. Times are the machine's monotonic clock."""

    options: dict[str, Any]
    logs: list[SwarmLog]
    steady: Any
    growth: Any
    after: Any
    admin_ms: list[float]
    admin_failures: int
    started_at: float
    connected_at: float
    killed_at: float
    acting_at: float
    again_at: float
    followed_at: float
    made: list[NewKey]
    real: list[Any]
    real_after: list[Any]
    behind: list[str]
    tables_sent: list[str]


def latencies_s(measured: ControlPlaneRun, from_s: float, to_s: float) -> list[float]:
    """Return how long each change reported in this period took to reach each router.

    A change that was undone before it was published is left out: no table contained it.
    """
    received: dict[tuple[str, bool], list[list[float]]] = defaultdict(list)
    for log in measured.logs:
        for update in log.updates:
            for replica_id in update.set_ids:
                received[replica_id, True].append(update.at)
            for replica_id in update.gone_ids:
                received[replica_id, False].append(update.at)
    changes = sorted(
        (change.at, change.replica_id, change.is_warm)
        for log in measured.logs
        for change in log.changes
    )
    undone_at: dict[str, float] = {}
    found: list[float] = []
    for at, replica_id, is_warm in reversed(changes):
        until = undone_at.get(replica_id, float("inf"))
        undone_at[replica_id] = at
        if not from_s <= at < to_s:
            continue
        after = [times for times in received[replica_id, is_warm] if at <= min(times) < until]
        if after:
            found += [time - at for time in min(after, key=min)]
    return found


def everywhere_s(measured: ControlPlaneRun) -> list[float]:
    """Return how long each new key took to reach the last of all routers.

    Of the real routers, only the one that accepted the key is queried.
    """
    found = []
    for key in measured.made:
        received = [at for log in measured.logs for at in log.keys.get(key.key_id, ())]
        complete = len(received) >= measured.options["routers"] - measured.options["real_routers"]
        last = max([*received, key.accepted_at]) if complete else float("inf")
        found.append(last - key.made_at)
    return found


def reconnected_s(measured: ControlPlaneRun) -> list[float]:
    """Return after how many seconds from the kill each peer was registered again."""
    again: dict[str, float] = {}
    for log in measured.logs:
        for at, name in log.welcomes:
            if at > measured.killed_at:
                again.setdefault(name, at - measured.killed_at)
    return sorted(again.values())


def quantile(values: list[float], share: float) -> float:
    """Return a quantile by the nearest rank; NaN of an empty list."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(measured: ControlPlaneRun) -> str:
    """Return the run as a page of Markdown."""
    options = measured.options
    steady, after, growth = measured.steady, measured.after, measured.growth
    # Changes of the last seconds are published by the next scheduler, and belong to the failover.
    steady_s = latencies_s(measured, measured.connected_at, measured.killed_at - 10.0)
    again = reconnected_s(measured)
    settled = latencies_s(measured, measured.again_at, float("inf"))
    per_s: dict[int, int] = defaultdict(int)
    for at in again:
        per_s[int(at)] += 1
    peers = options["agents"] + options["routers"]
    rows = [
        ("peers connected, after all connect at once", f"{peers}",
         f"{measured.connected_at - measured.started_at:.1f} s"),
        ("scheduler CPU, share of one core", "mean / p99 of 1 s",
         f"{_mean(steady.cpu_shares):.2f} / {quantile(steady.cpu_shares, 0.99):.2f}"),
        ("Postgres CPU, share of one core", "mean", f"{steady.postgres_share:.2f}"),
        ("scheduler RSS", "mean / max",
         f"{_mean(steady.rss_mib):.0f} / {max(steady.rss_mib):.0f} MiB"),
        ("its planner, a process beside it", "CPU / max RSS",
         f"{steady.planner_share:.2f} / {max(steady.planner_rss_mib):.0f} MiB"),
        ("report to route table in a router's hands", f"p50 / p99 of {len(steady_s)}",
         f"{quantile(steady_s, 0.5):.2f} / {quantile(steady_s, 0.99):.2f} s"),
        ("admin API", f"p50 / p99 of {len(measured.admin_ms)}",
         f"{quantile(measured.admin_ms, 0.5):.0f} / {quantile(measured.admin_ms, 0.99):.0f} ms"),
        ("event loop lag", "p50 / p99 of a tick every 0.1 s, upper bound",
         f"{growth.late_s(0.5)} / {growth.late_s(0.99)} s"),
        ("event loop blocked for 0.1 s or more", "task, total s",
         growth.largest("stall_seconds_total", 4) or "never"),
        ("longest periodic jobs", "total s", growth.largest("job_seconds", 5, 'of="all"')),
        ("time until the standby acts, after the acting scheduler is killed", "",
         f"{measured.acting_at - measured.killed_at:.1f} s"),
        ("peers registered again, from the kill", "50 % / 99 % / all",
         f"{quantile(again, 0.5):.1f} / {quantile(again, 0.99):.1f} / {again[-1]:.1f} s"
         if again else "none"),
        ("most registrations in one second", "", f"{max(per_s.values(), default=0)}"),
        ("new scheduler's CPU, from the kill on", "mean / max of 1 s",
         f"{_mean(after.cpu_shares):.2f} / {max(after.cpu_shares):.2f}"),
        ("report to route table once all peers are back", f"p50 / p99 of {len(settled)}",
         f"{quantile(settled, 0.5):.2f} / {quantile(settled, 0.99):.2f} s"),
        *_router_rows(measured),
        ("whole route tables sent / admin failures / max lateness of simulators", "",
         f"{sum(len(log.snapshots) for log in measured.logs)} / {measured.admin_failures} / "
         f"{max(log.late_s_max for log in measured.logs):.2f} s"),
    ]  # fmt: skip
    lines = [
        "# The control plane at scale",
        "",
        f"{options['agents']} agents ({options['devices']} devices and {options['replicas']} warm "
        f"replicas each), {options['routers']} routers ({options['real_routers']} of them real, "
        f"{options['empty']} of the simulated ones without keys at the beginning), "
        f"{options['keys']} keys and {MODELS} deployments on one scheduler; "
        f"pulses every 2 s, reports every 10 s, demand every 5 s, "
        f"{options['changes']:g} replica state changes a second; {options['seconds']:g} s.",
        "",
        f"2 vCPU, Debian 12, shared by the simulators, Postgres and both schedulers; Python "
        f"{python_version()}, aiohttp {version('aiohttp')}, asyncpg {version('asyncpg')}; "
        f"{datetime.now(UTC):%Y-%m-%d}.",
        "",
        f"    python -m ops.bench.control_plane --agents {options['agents']} "
        f"--routers {options['routers']} --keys {options['keys']} "
        f"--for {options['seconds']:g} --write",
        "",
        "| what | | measured |",
        "|---|---|---|",
        *(f"| {what} | {unit} | {value} |" for what, unit, value in rows),
        "",
    ]
    return "\n".join(lines)


def _router_rows(measured: ControlPlaneRun) -> list[tuple[str, str, str]]:
    """Return the rows about new keys and about the real routers."""
    accepted = [key.accepted_at - key.made_at for key in measured.made]
    everywhere = everywhere_s(measured)
    rows = [
        ("all routers have the first table, from the start", "",
         f"{measured.followed_at - measured.started_at:.0f} s"),
        ("tables sent with all keys / with those that the router was missing",
         "before and after the kill", "; ".join(measured.tables_sent)),
        ("new key: accepted by a real router / known to all routers",
         f"p50 / max of {len(measured.made)}",
         f"{quantile(accepted, 0.5):.2f} / {max(accepted):.2f} s; "
         f"{quantile(everywhere, 0.5):.2f} / {max(everywhere):.2f} s"),
        ("peers that the status names as not following", "; ".join(measured.behind)[:300],
         f"{len(measured.behind)}"),
    ]  # fmt: skip
    for real, after in zip(measured.real, measured.real_after, strict=True):
        stalls, cpu = real.later_stalls_ms, real.later_cpu_ms
        failover = after.later_stalls_ms[len(stalls) :]
        failover_cpu = after.later_cpu_ms[len(cpu) :]
        rows += [
            ("a real router's table", "keys / replicas", f"{after.keys} / {after.routes}"),
            ("its memory", "now / peak", f"{after.memory_mib:.0f} / {after.peak_mib:.0f} MiB"),
            ("its event loop's longest stall (CPU time in one)",
             "first table / later, median and longest second / stopped once, failover",
             f"{real.first_table_stall_ms:.0f} ({real.first_table_cpu_ms:.0f}) ms / "
             f"{quantile(stalls, 0.5):.0f} and {max(stalls, default=0):.0f} "
             f"({quantile(cpu, 0.5):.0f} and {max(cpu, default=0):.0f}) ms / "
             f"{max(failover, default=0):.0f} ({max(failover_cpu, default=0):.0f}) ms"),
        ]  # fmt: skip
    return rows


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _rss_mib(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / MIB
    except FileNotFoundError:
        return 0.0


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _children_s(pid: int) -> float:
    """Return the CPU seconds of a process's children, reaped ones included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    total = (int(fields[13]) + int(fields[14])) / TICKS_PER_S
    for child in _children(pid):
        with suppress(FileNotFoundError):
            total += _cpu_s(child)
    return total


def _tree_s(pid: int) -> float:
    """Return the CPU seconds of a process and its children."""
    return _cpu_s(pid) + _children_s(pid)
