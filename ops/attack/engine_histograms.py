"""What vLLM's own histograms say about a time: its queue, prompts, steps, and times to first token.

A time to first token begins in its server and contains what its other process, the engine's core,
counts apart: the queue and the prompt.
"""

from collections.abc import Mapping
from math import inf
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

HISTOGRAMS: Final = {
    "vllm:time_to_first_token_seconds": "s to the first token",
    "vllm:request_queue_time_seconds": "s in its queue",
    "vllm:request_prefill_time_seconds": "s for the prompt",
    "vllm:inter_token_latency_seconds": "s between tokens",
    "vllm:iteration_tokens_total": "tokens in a step",
}
Counts = dict[str, dict[float, float]]
"""By histogram: how many values were at most each bound."""


def read_histograms(page: str) -> Counts:
    """Return the histograms of a page of Prometheus metrics."""
    found: Counts = {name: {} for name in HISTOGRAMS}
    for family in text_string_to_metric_families(page):
        if family.type != "histogram" or family.name not in found:
            continue
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                counts = found[family.name]
                counts[bound] = counts.get(bound, 0.0) + sample.value
    return found


def describe(before: Counts, after: Counts) -> str:
    """Return the bounds below which 99 of 100 and all values lie that came between two pages."""
    parts = []
    for name, words in HISTOGRAMS.items():
        new = {bound: count - before[name].get(bound, 0.0) for bound, count in after[name].items()}
        if total := new.get(inf, 0.0):
            p99, most = _bound(new, 0.99 * total), _bound(new, total)
            parts.append(f"{total:.0f} times {words} (99 % up to {p99:g}, all up to {most:g})")
    return "; ".join(parts)


def _bound(counts: Mapping[float, float], least: float) -> float:
    return next(bound for bound in sorted(counts) if counts[bound] >= least)
