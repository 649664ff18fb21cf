"""Which requests a node blames when an engine fails."""

from nodeagent.decide.blame import BlameLedger


def test_all_that_ran_are_blamed_if_none_was_on_trial() -> None:
    ledger = BlameLedger()
    reading, streaming, over = [ledger.begin(is_on_trial=False) for _ in range(3)]
    ledger.end_trial(streaming)
    ledger.end_trial(over)
    ledger.end_trial(over)
    assert ledger.is_blamed(reading)
    ledger.end_trial(reading)
    assert ledger.is_blamed(streaming)


def test_during_a_trial_only_the_suspect_is_blamed_whoever_sees_the_loss_first() -> None:
    for sees_first in ("trial", "streaming"):
        ledger = BlameLedger()
        streaming = ledger.begin(is_on_trial=False)
        ledger.end_trial(streaming)
        trial = ledger.begin(is_on_trial=True)
        fresh = ledger.begin(is_on_trial=False)
        order = [trial, streaming] if sees_first == "trial" else [streaming, trial]
        blamed = []
        for request in (*order, fresh):
            if ledger.is_blamed(request):
                blamed.append(request)
            ledger.end_trial(request)
        assert blamed == [trial]


def test_a_trial_ends_with_the_first_token() -> None:
    ledger = BlameLedger()
    streaming = ledger.begin(is_on_trial=True)
    ledger.end_trial(streaming)
    assert ledger.is_blamed(streaming)


def test_each_loss_has_a_verdict_of_its_own() -> None:
    ledger = BlameLedger()
    trial = ledger.begin(is_on_trial=True)
    assert ledger.is_blamed(trial)
    ledger.end_trial(trial)
    later = ledger.begin(is_on_trial=False)
    ledger.end_trial(later)
    assert ledger.is_blamed(later)
