"""Predicts how long a request waits while an engine runs as many sequences as it can."""


def sequence_wait_ms(requests: int, sequences_max: int, sequence_ms: float) -> float:
    """Return how long one more request waits until the engine has a sequence for it.

    The engine runs `sequences_max` at once (0 if unknown), of which one ends every `sequence_ms`.
    `requests` are there already; those that would be preempted for this one do not count.
    """
    if not sequences_max:
        return 0.0
    return sequence_ms * max(0, requests + 1 - sequences_max)
