"""When a process lets tokens gather, and that it never does so for anything else."""

from router.decide.token_gathering import TokenGathering

GATHER_S = 0.0015


def turns(gathering: TokenGathering, *, tokens_per_s: int, seconds: float) -> tuple[int, float]:
    """Let tokens come evenly; return how often the process woke and the longest a token waited."""
    wake_ups, longest_s, now_s, handled = 0, 0.0, 100.0, 0
    began_s = now_s
    while now_s < began_s + seconds:
        due_s = began_s + (handled + 1) / tokens_per_s
        now_s = max(now_s, due_s)
        wake_ups += 1
        while began_s + (handled + 1) / tokens_per_s <= now_s + 1e-9:
            handled += 1
            longest_s = max(longest_s, now_s - (began_s + handled / tokens_per_s))
            gathering.note_token()
        now_s += gathering.pause_s(now_s)
    return wake_ups, longest_s


def test_many_tokens_share_a_wake_up_and_none_waits_longer_than_the_limit() -> None:
    wake_ups, longest_s = turns(TokenGathering(GATHER_S), tokens_per_s=10_000, seconds=2.0)
    # The first window is counted awake; then there is one wake-up for each pause.
    assert wake_ups <= 1000 + 1.9 / GATHER_S * 1.1
    assert longest_s <= GATHER_S + 1e-6


def test_a_few_tokens_are_relayed_at_once() -> None:
    wake_ups, longest_s = turns(TokenGathering(GATHER_S), tokens_per_s=300, seconds=2.0)
    assert wake_ups >= 599
    assert longest_s < 1e-6


def test_a_request_keeps_the_process_awake() -> None:
    gathering = TokenGathering(GATHER_S)
    turns(gathering, tokens_per_s=10_000, seconds=1.0)
    now_s = 101.01
    gathering.note_token()
    gathering.pause_s(now_s)
    gathering.note_token()
    gathering.note_other()
    assert gathering.pause_s(now_s + 0.0001) == 0
    gathering.note_token()
    assert gathering.pause_s(now_s + 0.0002) > 0


def test_no_pause_is_longer_than_the_limit_after_the_clock_stood_still() -> None:
    gathering = TokenGathering(GATHER_S)
    turns(gathering, tokens_per_s=10_000, seconds=1.0)
    for _ in range(3):
        gathering.note_token()
        assert gathering.pause_s(50.0) <= GATHER_S


def test_gathering_can_be_turned_off() -> None:
    wake_ups, longest_s = turns(TokenGathering(0.0), tokens_per_s=10_000, seconds=0.5)
    assert wake_ups >= 4_999
    assert longest_s < 1e-6
