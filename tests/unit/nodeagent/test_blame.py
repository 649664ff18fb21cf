"""Which requests a node blames when an engine fails."""

from nodeagent.decide.blame import BlameLedger


def test_all_that_ran_are_blamed_if_none_was_on_trial() -> None:
    ledger = BlameLedger()
    reading, streaming, over = [ledger.begin(is_on_trial=False) for _ in range(3)]
    ledger.record_token(streaming)
    ledger.record_token(over)
    ledger.end(over)
    assert ledger.is_blamed(reading)
    ledger.end(reading)
    assert ledger.is_blamed(streaming)


def test_during_a_trial_a_request_with_a_token_is_not_blamed_whoever_sees_the_loss_first() -> None:
    for sees_first in ("trial", "streaming"):
        ledger = BlameLedger()
        streaming = ledger.begin(is_on_trial=False)
        ledger.record_token(streaming)
        trial = ledger.begin(is_on_trial=True)
        fresh = ledger.begin(is_on_trial=False)
        order = [trial, streaming] if sees_first == "trial" else [streaming, trial]
        blamed = []
        for request in (*order, fresh):
            if ledger.is_blamed(request):
                blamed.append(request)
            ledger.end(request)
        assert set(blamed) == {trial, fresh}


def test_a_trial_ends_with_the_first_token() -> None:
    ledger = BlameLedger()
    streaming = ledger.begin(is_on_trial=True)
    ledger.record_token(streaming)
    assert ledger.is_blamed(streaming)


def test_each_loss_has_a_verdict_of_its_own() -> None:
    ledger = BlameLedger()
    trial = ledger.begin(is_on_trial=True)
    assert ledger.is_blamed(trial)
    ledger.end(trial)
    later = ledger.begin(is_on_trial=False)
    ledger.record_token(later)
    assert ledger.is_blamed(later)
