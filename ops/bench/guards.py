"""Measures what a request pays for key check, limits, queue and health; and what guessed keys cost.

    python -m ops.bench.guards

Prints the table of ops/bench/guards.md. All cases run in one process and take turns, so that noise
of the machine affects all of them; the best turn is what the code costs.
"""

import argparse
import gc
import hashlib
import time
from collections.abc import Callable
from typing import Final

import psutil

from isochrone.wire.client_keys.keys import format_key, parse_key
from isochrone.wire.errors import ApiError
from isochrone.wire.ids import DeploymentId, KeyId, ReplicaId, TenantId
from isochrone.wire.models.model import Price
from isochrone.wire.peers.routes import KeyEntry, KeyLimits, KeyTable
from router.decide.admission.authentication import authenticate
from router.decide.admission.fair_queue import FairQueue, Ticket
from router.decide.admission.limits import KeyLimiter
from router.decide.admission.retry_budget import RetryBudget
from router.decide.liveness.outlier_ejection import ReplicaHealth

TURNS: Final = 15
CALLS: Final = 4_000
KEYS: Final = 5_000
GUESSES: Final = 1_000_000
UNIX_S: Final = 1.7e9
D: Final = DeploymentId("d")
ALL: Final = KeyLimits(
    requests_per_min=10**9,
    tokens_per_min=10**12,
    concurrency=10**6,
    tokens_per_day=10**15,
    spend_per_day=1e12,
)


def a_key(number: int, limits: KeyLimits) -> tuple[str, KeyEntry]:
    """Return an API key's Authorization header and its entry in the route table."""
    text = format_key(KeyId(f"{number:012d}"), hashlib.sha256(b"%d" % number).digest())
    parsed = parse_key(text)
    assert parsed is not None
    entry = KeyEntry(
        key_id=parsed[0], secret_sha256=parsed[1], tenant_id=TenantId("t"), limits=limits
    )
    return f"Bearer {text}", entry


def cases() -> dict[str, Callable[[int], None]]:
    """Return the measured functions by name; each takes the number of the call."""
    all_keys = [a_key(number, ALL) for number in range(KEYS)]
    keys = KeyTable.of(entry for _, entry in all_keys)
    limiter, health, budget = KeyLimiter(), ReplicaHealth(), RetryBudget()
    price = Price(prompt_per_million=1.0, output_per_million=2.0)
    free = a_key(KEYS, KeyLimits())[1]
    queue: FairQueue[Ticket] = FairQueue(100_000, 2**40)
    tenants = [TenantId(f"t{number}") for number in range(1000)]
    for number in range(10_000):
        queue.push(Ticket(D, tenants[number % 1000], 100))
    replica = ReplicaId("r")

    def limits(call: int) -> None:
        now_s = 1.0 + call * 1e-3
        spend = price.spend(100, 0, 50)
        entry = limiter.admit(all_keys[call % KEYS][1], 150, now_s, UNIX_S, spend)
        entry.settle(120, now_s, price.spend(100, 20, 20))

    def no_limits(call: int) -> None:
        limiter.admit(free, 150, 1.0, UNIX_S).settle(120, 1.0)

    def headers(call: int) -> None:
        entry = limiter.admit(all_keys[call % KEYS][1], 150, 10.0, UNIX_S)
        entry.header_lines(10.0)
        entry.settle(150, 10.0)

    def queued(call: int) -> None:
        queue.push(Ticket(D, tenants[call % 1000], 100))
        head = queue.head(D)
        assert head is not None
        queue.take(head, float(call))

    def healthy(call: int) -> None:
        budget.deposit(call * 1e-3)
        health.record_sent(replica, call * 1e-3)
        health.record_success(replica)

    return {
        "key: `authenticate`": lambda call: void(
            authenticate(keys, all_keys[call % KEYS][0], UNIX_S)
        ),
        "limits: `admit` + `settle`, all five limits": limits,
        "limits: `admit` + `settle`, a key without any": no_limits,
        "limits: the same with `x-ratelimit-*` headers written": headers,
        "queue: in and out, 10,000 of 1,000 tenants waiting": queued,
        "health and retry budget, a healthy replica": healthy,
    }


def void(_: object) -> None:
    """Drop a result, so that the case returns None."""


def turn_us(case: Callable[[int], None]) -> float:
    """Return the microseconds per call of one turn."""
    began = time.perf_counter()
    for call in range(CALLS):
        case(call)
    return 1e6 * (time.perf_counter() - began) / CALLS


def guess() -> tuple[int, float, float]:
    """Try keys that do not exist; return the states and MiB they leave, and us per guess."""
    known = a_key(0, ALL)[1]
    limiter, process = KeyLimiter(), psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    began = time.perf_counter()
    text = format_key(KeyId("0" * 12), bytes(32))
    for number in range(GUESSES):
        # Another id and secret each time; every hundredth has a valid checksum.
        tail = f"{number:07d}"
        guessed = f"iso_{tail.rjust(12, 'a')}_{tail.rjust(43, 'B')}{text[-7:]}"
        if number % 100 == 0:
            guessed = format_key(KeyId(tail.rjust(12, "a")), number.to_bytes(32, "big"))
        try:
            limiter.admit(authenticate(KeyTable.of([known]), f"Bearer {guessed}", UNIX_S), 1, 0, 0)
        except ApiError:
            continue
    took_us = 1e6 * (time.perf_counter() - began) / GUESSES
    return len(limiter), (process.memory_info().rss - before) / 2**20, took_us


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = {name: (case, list[float]()) for name, case in cases().items()}
    for _ in range(TURNS):
        for case, taken_us in rows.values():
            taken_us.append(turn_us(case))
    print("| case | best, us | median, us |\n|---|---:|---:|")
    for name, (_, taken_us) in rows.items():
        print(f"| {name} | {min(taken_us):.2f} | {sorted(taken_us)[TURNS // 2]:.2f} |")
    states, grown_mib, took_us = guess()
    print(
        f"\n{GUESSES:,} guessed keys: {states} states kept, "
        f"{grown_mib:+.1f} MiB of memory, {took_us:.2f} us each."
    )


if __name__ == "__main__":
    main()
