"""What the control plane's benchmark makes of what it saw: CPU from /proc, latencies, a table."""

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

from ops.bench.control_plane_peers import Seen

TICKS_PER_S: Final = sysconf("SC_CLK_TCK")
PAGE_BYTES: Final = sysconf("SC_PAGE_SIZE")
MIB: Final = 1024 * 1024


class Window:
    """The CPU and memory of a scheduler, of its planner and its Postgres, over some time."""

    def __init__(self, scheduler_pid: int, postgres_pid: int) -> None:
        self.cpu_shares: list[float] = []
        self.rss_mib: list[float] = []
        self.planner_rss_mib = [0.0]
        self.planner_share = self.postgres_share = 0.0
        self._pid = scheduler_pid
        self._postgres = postgres_pid

    async def watch(self, seconds: float) -> None:
        """Look once a second."""
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


class Told:
    """What the scheduler's own metrics say of some time: how late its event loop was, and why."""

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        """Take its pages at the beginning and the end."""
        begun = _numbers(before)
        self._grew = {name: value - begun.get(name, 0.0) for name, value in _numbers(after).items()}

    def late_s(self, share: float) -> str:
        """Return within which of its buckets so many beats of the loop came."""
        prefix = "isochrone_scheduler_lag_seconds_bucket"
        total = self._grew.get("isochrone_scheduler_lag_seconds_count", 0.0)
        for name, count in self._grew.items():
            if name.startswith(prefix) and count >= share * total:
                return name.partition('"')[2].partition('"')[0]
        return "nan"

    def most(self, metric: str, count: int, of: str = "") -> str:
        """Return the largest of a metric's labels, each with its seconds."""
        rows = [
            (value, name.partition('"')[2].partition('"')[0])
            for name, value in self._grew.items()
            if name.startswith(f"isochrone_scheduler_{metric}{{") and of in name and value > 0
        ]
        return ", ".join(f"{name} {value:.1f}" for value, name in sorted(rows)[-count:][::-1])


def _numbers(page: Sequence[str]) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in page if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


class Measured(msgspec.Struct, kw_only=True):
    """Everything that a run saw. Times are the machine's monotonic clock."""

    options: dict[str, Any]
    seen: list[Seen]
    steady: Any
    told: Any
    after: Any
    admin_ms: list[float]
    admin_failures: int
    started_at: float
    connected_at: float
    killed_at: float
    acting_at: float
    again_at: float


def latencies_s(measured: Measured, from_s: float, to_s: float) -> list[float]:
    """Return, for each change reported in this time and each router, how long until it knew.

    A change undone before it was told to anyone is left out: the table never held it.
    """
    told: dict[tuple[str, bool], list[list[float]]] = defaultdict(list)
    for seen in measured.seen:
        for delta in seen.told:
            for replica_id in delta.set_ids:
                told[replica_id, True].append(delta.at)
            for replica_id in delta.gone_ids:
                told[replica_id, False].append(delta.at)
    changes = sorted(
        (change.at, change.replica_id, change.is_warm)
        for seen in measured.seen
        for change in seen.changes
    )
    undone_at: dict[str, float] = {}
    found: list[float] = []
    for at, replica_id, is_warm in reversed(changes):
        until = undone_at.get(replica_id, float("inf"))
        undone_at[replica_id] = at
        if not from_s <= at < to_s:
            continue
        after = [times for times in told[replica_id, is_warm] if at <= min(times) < until]
        if after:
            found += [time - at for time in min(after, key=min)]
    return found


def reconnected_s(measured: Measured) -> list[float]:
    """Return when each peer was welcome again, counted from the kill."""
    again: dict[str, float] = {}
    for seen in measured.seen:
        for at, name in seen.welcomes:
            if at > measured.killed_at:
                again.setdefault(name, at - measured.killed_at)
    return sorted(again.values())


def quantile(values: list[float], share: float) -> float:
    """Return a quantile by the nearest rank; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(measured: Measured) -> str:
    """Return the run as a page of Markdown."""
    options = measured.options
    steady, after, told = measured.steady, measured.after, measured.told
    # What is reported in the last moments is told by the next scheduler: that is the failover's.
    ran = latencies_s(measured, measured.connected_at, measured.killed_at - 10.0)
    again = reconnected_s(measured)
    settled = latencies_s(measured, measured.again_at, float("inf"))
    per_s: dict[int, int] = defaultdict(int)
    for at in again:
        per_s[int(at)] += 1
    peers = options["agents"] + options["routers"]
    rows = [
        ("peers connected, from all dialling at once", f"{peers}",
         f"{measured.connected_at - measured.started_at:.1f} s"),
        ("scheduler CPU, share of one core", "mean / p99 of 1 s",
         f"{_mean(steady.cpu_shares):.2f} / {quantile(steady.cpu_shares, 0.99):.2f}"),
        ("Postgres CPU, share of one core", "mean", f"{steady.postgres_share:.2f}"),
        ("scheduler RSS", "mean / most",
         f"{_mean(steady.rss_mib):.0f} / {max(steady.rss_mib):.0f} MiB"),
        ("its planner, a process beside it", "CPU / RSS at most",
         f"{steady.planner_share:.2f} / {max(steady.planner_rss_mib):.0f} MiB"),
        ("report to route table in a router's hands", f"p50 / p99 of {len(ran)}",
         f"{quantile(ran, 0.5):.2f} / {quantile(ran, 0.99):.2f} s"),
        ("admin API", f"p50 / p99 of {len(measured.admin_ms)}",
         f"{quantile(measured.admin_ms, 0.5):.0f} / {quantile(measured.admin_ms, 0.99):.0f} ms"),
        ("event loop late", "p50 / p99 of a beat every 0.1 s, at most",
         f"{told.late_s(0.5)} / {told.late_s(0.99)} s"),
        ("event loop held up for 0.1 s and more", "by, s in all",
         told.most("stall_seconds_total", 4) or "never"),
        ("longest duties", "s in all", told.most("job_seconds", 5, 'of="all"')),
        ("acting scheduler killed: the standby acts", "after",
         f"{measured.acting_at - measured.killed_at:.1f} s"),
        ("peers welcome again, counted from the kill", "50 % / 99 % / all",
         f"{quantile(again, 0.5):.1f} / {quantile(again, 0.99):.1f} / {again[-1]:.1f} s"
         if again else "none"),
        ("most registrations in one second", "", f"{max(per_s.values(), default=0)}"),
        ("new scheduler's CPU, from the kill on", "mean / most of 1 s",
         f"{_mean(after.cpu_shares):.2f} / {max(after.cpu_shares):.2f}"),
        ("report to route table once all are back", f"p50 / p99 of {len(settled)}",
         f"{quantile(settled, 0.5):.2f} / {quantile(settled, 0.99):.2f} s"),
        ("route tables sent whole / admin failures / simulators late", "",
         f"{sum(len(seen.snapshots) for seen in measured.seen)} / {measured.admin_failures} / "
         f"{max(seen.late_s_max for seen in measured.seen):.2f} s"),
    ]  # fmt: skip
    lines = [
        "# The control plane at scale",
        "",
        f"{options['agents']} agents ({options['devices']} devices and a warm replica each) and "
        f"{options['routers']} routers on one scheduler; pulses every 2 s, reports every 10 s, "
        f"demand every 5 s, {options['changes']:g} replicas a second that change their state; "
        f"{options['seconds']:g} s.",
        "",
        f"2 vCPU, Debian 12, shared by the simulators, Postgres and both schedulers; Python "
        f"{python_version()}, aiohttp {version('aiohttp')}, asyncpg {version('asyncpg')}; "
        f"{datetime.now(UTC):%Y-%m-%d}.",
        "",
        f"    python -m ops.bench.control_plane --agents {options['agents']} "
        f"--routers {options['routers']} --for {options['seconds']:g} --write",
        "",
        "| what | | seen |",
        "|---|---|---|",
        *(f"| {what} | {how} | {seen} |" for what, how, seen in rows),
        "",
    ]
    return "\n".join(lines)


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
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _children_s(pid: int) -> float:
    """Return the CPU of a process's children, those it reaped among them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    total = (int(fields[13]) + int(fields[14])) / TICKS_PER_S
    for child in _children(pid):
        with suppress(FileNotFoundError):
            total += _cpu_s(child)
    return total


def _tree_s(pid: int) -> float:
    """Return the CPU of a process and of its children."""
    return _cpu_s(pid) + _children_s(pid)
