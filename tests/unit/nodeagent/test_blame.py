"""Which requests a node blames when an engine fails."""

from nodeagent.decide.requests.blame import EXIT_DELAY_S, BlameLedger

ENGINE = 7


def test_all_that_ran_are_blamed_if_none_was_on_trial() -> None:
    ledger = BlameLedger()
    reading, streaming, over = [ledger.begin(ENGINE, is_on_trial=False) for _ in range(3)]
    ledger.end_trial(streaming)
    ledger.end_trial(over)
    ledger.end_trial(over)
    assert ledger.is_blamed(reading, 0.0)
    ledger.end_trial(reading)
    assert ledger.is_blamed(streaming, 0.0)


def test_during_a_trial_only_the_suspect_is_blamed_whoever_sees_the_loss_first() -> None:
    for sees_first in ("trial", "streaming"):
        ledger = BlameLedger()
        streaming = ledger.begin(ENGINE, is_on_trial=False)
        ledger.end_trial(streaming)
        trial = ledger.begin(ENGINE, is_on_trial=True)
        fresh = ledger.begin(ENGINE, is_on_trial=False)
        order = [trial, streaming] if sees_first == "trial" else [streaming, trial]
        blamed = []
        for request in (*order, fresh):
            if ledger.is_blamed(request, 0.0):
                blamed.append(request)
            ledger.end_trial(request)
        assert blamed == [trial]


def test_a_trial_ends_with_the_first_token() -> None:
    ledger = BlameLedger()
    streaming = ledger.begin(ENGINE, is_on_trial=True)
    ledger.end_trial(streaming)
    assert ledger.is_blamed(streaming, 0.0)


def test_each_loss_has_a_verdict_of_its_own() -> None:
    ledger = BlameLedger()
    trial = ledger.begin(ENGINE, is_on_trial=True)
    assert ledger.is_blamed(trial, 0.0)
    ledger.end_trial(trial)
    later = ledger.begin(ENGINE, is_on_trial=False)
    ledger.end_trial(later)
    assert ledger.is_blamed(later, 0.0)


def test_a_request_sent_to_an_engine_that_has_just_failed_is_late_and_only_then() -> None:
    ledger = BlameLedger()
    poison = ledger.begin(ENGINE, is_on_trial=True)
    running = ledger.begin(ENGINE, is_on_trial=False)
    assert not ledger.is_late(poison, 10.0)
    assert ledger.is_blamed(poison, 10.0)
    ledger.end_trial(poison)
    next_suspect = ledger.begin(ENGINE, is_on_trial=True)
    next_engine = ledger.begin(ENGINE + 1, is_on_trial=False)
    assert ledger.is_late(next_suspect, 10.0 + EXIT_DELAY_S)
    assert not ledger.is_late(next_suspect, 10.1 + EXIT_DELAY_S)
    assert not ledger.is_late(running, 10.1)
    assert not ledger.is_late(next_engine, 10.1)
    # The engine did not exit after all: its next failure is judged anew.
    assert not ledger.is_blamed(running, 10.2)
    assert ledger.is_blamed(next_suspect, 10.2)
