"""Messages of one peer pass in a burst at once, then at the configured rate."""

from scheduler.decide.membership.message_rate_limit import BURST_S, MESSAGE_BYTES, MessageRateLimit


def test_a_burst_passes_at_once_and_later_messages_at_the_rate() -> None:
    pace = MessageRateLimit(4.0)
    burst = int(4.0 * BURST_S)
    assert [pace.wait_s(100, 0.0) for _ in range(burst)] == [0.0] * burst
    assert [pace.wait_s(100, 0.0) for _ in range(3)] == [0.25, 0.5, 0.75]
    assert pace.wait_s(100, 1.0) == 0.0, "it has waited"
    assert [pace.wait_s(100, 1000.0) for _ in range(burst)] == [0.0] * burst, "peace is forgotten"
    assert pace.wait_s(100, 1000.0) > 0.0


def test_a_large_message_counts_as_several() -> None:
    pace = MessageRateLimit(1.0)
    assert pace.wait_s(9 * MESSAGE_BYTES, 0.0) == 0.0
    assert pace.wait_s(0, 0.0) == 1.0
