"""The decision rules of other routers as their sources state them, as plain functions.

Sources: llm-d-router ebab6879 (pkg/epp/framework/plugins/scheduling/scorer, weights of
config/charts/routerlib/templates/_config.yaml); Dynamo 07a6c9ce
(lib/kv-router/src/scheduling/selector/default.rs); AIBrix e3e10f9e
(pkg/plugins/gateway/algorithms/prefix_cache.go); smg 73da68ca
(model_gateway/src/policies/cache_aware.rs). Their own tests are repeated in
tests/unit/sim/test_rival_scores.py.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

LLMD_PREFIX_WEIGHT: Final = 3.0
LLMD_QUEUE_WEIGHT: Final = 2.0
LLMD_KV_WEIGHT: Final = 2.0

LLMD_QUEUE_MAX: Final = 5.0
LLMD_KV_MAX: Final = 0.8
"""llm-d takes a pool as saturated when the mean of these two shares, the larger one of each
replica, reaches 1."""

AIBRIX_IMBALANCE_REQUESTS: Final = 8
AIBRIX_DEVIATIONS: Final = 1.0

SMG_MATCH_MIN: Final = 0.5
SMG_IMBALANCE_REQUESTS: Final = 32
SMG_IMBALANCE_RATIO: Final = 1.1


def llmd_queue_scores(waiting: Mapping[int, int]) -> dict[int, float]:
    """Score 1 for the shortest queue and 0 for the longest; 1 for all if they are equal."""
    low, high = min(waiting.values()), max(waiting.values())
    return {
        replica: 1.0 if high == low else (high - count) / (high - low)
        for replica, count in waiting.items()
    }


def llmd_kv_score(usage: float) -> float:
    """Score the share of KV memory that is free."""
    return 1.0 - usage


def llmd_prefix_score(matched_blocks: int, blocks: int) -> float:
    """Score the share of the prompt's blocks that is cached."""
    return matched_blocks / blocks if blocks else 0.0


def llmd_saturation(waiting: Mapping[int, int], usage: Mapping[int, float]) -> float:
    """Return how saturated a pool is; from 1 on it takes no more."""
    shares = [
        max(waiting[replica] / LLMD_QUEUE_MAX, usage[replica] / LLMD_KV_MAX) for replica in waiting
    ]
    return statistics.fmean(shares)


class DynamoLoad(NamedTuple):
    """The load booked by Dynamo's router at one worker, in blocks, and the blocks cached there."""

    active_prefill_blocks: float
    decode_blocks: float
    overlap_blocks: float


def dynamo_cost(
    load: DynamoLoad,
    request_blocks: float,
    overlap_credit: float = 1.0,
    prefill_load_scale: float = 1.0,
) -> float:
    """Return the cost of a worker; the lowest is taken."""
    prefill = load.active_prefill_blocks + request_blocks - overlap_credit * load.overlap_blocks
    return prefill_load_scale * max(0.0, prefill) + load.decode_blocks


def aibrix_least_loaded_if_imbalanced(
    requests: Mapping[int, int], limit: int = AIBRIX_IMBALANCE_REQUESTS
) -> set[int]:
    """Return the replicas with fewest requests if the spread exceeds the limit, else none."""
    if not requests:
        return set()
    low, high = min(requests.values()), max(requests.values())
    if high - low <= limit:
        return set()
    return {replica for replica, count in requests.items() if count == low}


def aibrix_matched_replica(
    requests: Mapping[int, int],
    match_percent: Mapping[int, int],
    chance: random.Random,
    deviations: float = AIBRIX_DEVIATIONS,
) -> int | None:
    """Return the replica with the longest match whose requests are not far above the mean."""
    counts = [float(count) for count in requests.values()]
    spread = statistics.stdev(counts) if len(counts) > 1 else 0.0
    limit = statistics.fmean(counts) + deviations * spread if counts else 0.0
    matched = sorted(match_percent)
    chance.shuffle(matched)
    matched.sort(key=lambda replica: (-match_percent[replica], requests[replica]))
    return next((replica for replica in matched if requests[replica] <= limit), None)


def smg_is_imbalanced(
    requests: Sequence[int],
    abs_limit: int = SMG_IMBALANCE_REQUESTS,
    ratio_limit: float = SMG_IMBALANCE_RATIO,
) -> bool:
    """Return whether the spread of requests exceeds both limits."""
    low, high = min(requests), max(requests)
    return high - low > abs_limit and high > ratio_limit * low
