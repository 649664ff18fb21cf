"""A node admits generations by number and tenant: what exceeds the engine waits in the routers."""

import pytest

from isochrone.wire.models.model import EngineSettings
from nodeagent.decide.requests.admission import ReplicaAdmission, TokenReservation
from nodeagent.decide.requests.preemption import BatchItem
from nodeagent.drivers import sequences_max
from tests.builders import a_spec


def admit(admission: ReplicaAdmission, tenant: str | None) -> TokenReservation | None:
    return admission.admit(10, 10, generates_for=tenant)


def test_a_tenant_gets_the_sequences_and_a_surplus_and_another_tenant_still_enters() -> None:
    admission = ReplicaAdmission(tokens_max=1_000_000, sequences_max=16)
    flood = [admit(admission, "flood") for _ in range(50)]
    admitted = [reservation for reservation in flood if reservation is not None]
    assert len(admitted) == 20
    small = admit(admission, "small")
    assert small is not None
    assert admit(admission, "small") is None
    # What generates nothing takes no place.
    assert admit(admission, None) is not None
    small.release()
    again = admit(admission, "small")
    assert again is not None
    for reservation in (*admitted[:2], again):
        reservation.release()
        reservation.release()
    assert [admit(admission, "flood") is not None for _ in range(3)] == [True, True, False]


def test_an_engine_with_a_fair_queue_gets_more_but_keeps_places_for_other_tenants() -> None:
    admission = ReplicaAdmission(1_000_000, sequences_max=16, is_engine_fair=True)
    flood = [admit(admission, "flood") for _ in range(100)]
    assert sum(reservation is not None for reservation in flood) == 64
    assert admit(admission, "small") is not None


def test_first_generations_of_many_tenants_are_bounded_too() -> None:
    admission = ReplicaAdmission(tokens_max=1_000_000, sequences_max=4)
    reservations = [admit(admission, f"tenant-{number}") for number in range(100)]
    assert sum(reservation is not None for reservation in reservations) == 12
    for reservation in reservations:
        if reservation is not None:
            reservation.release()
    assert not admission._generations


def test_the_wait_for_a_sequence_is_that_of_the_expected_answers_until_one_has_ended() -> None:
    admission = ReplicaAdmission(1_000_000, sequences_max=4)
    assert admission.sequence_wait_ms() == 0.0
    running = [admission.admit(5, 100, generates_for="a", now_s=10.0) for _ in range(4)]
    assert admission.sequence_wait_ms() == 0.0, "the speed is unknown"
    admission.decode_tokens_per_s = lambda: 50.0
    assert admission.load(is_ping=True).sequence_ms == 2000
    assert admission.sequence_wait_ms() == 2000.0
    queued = admission.admit(5, 100, generates_for="a", now_s=11.0)
    assert admission.sequence_wait_ms() == 2 * 2000.0
    assert running[0] is not None and queued is not None
    running[0].release(10.5)
    assert admission.load(is_ping=True).sequence_ms == 500
    assert admission.sequence_wait_ms() == 500.0
    assert admission.load().sequence_ms == 0, "only pings have it"
    queued.release(11.0)
    assert admission.sequence_wait_ms() == 0.0


def test_items_of_batches_do_not_make_a_client_wait_for_a_sequence() -> None:
    admission = ReplicaAdmission(1_000_000, sequences_max=2)
    admission.decode_tokens_per_s = lambda: 100.0
    items = [BatchItem(0) for _ in range(3)]
    for item in items:
        assert admission.admit(5, 10, generates_for="a", now_s=1.0, item=item)
    assert admission.load(is_ping=True).batch_items == 3
    assert admission.sequence_wait_ms() == 0.0
    for _ in range(2):
        assert admission.admit(5, 10, generates_for="b", now_s=2.0)
    assert admission.sequence_wait_ms() == 100.0
    items[0].preempt()
    assert admission.load(is_ping=True).sequence_ms == 100, "a preemption is no end of an answer"


def test_without_a_known_limit_only_tokens_count() -> None:
    admission = ReplicaAdmission(tokens_max=2000)
    assert sum(admit(admission, "flood") is not None for _ in range(200)) == 100


@pytest.mark.parametrize(
    ("driver", "options", "expected"),
    [
        ("embedded", {}, 16),
        ("embedded", {"sequences_max": "4"}, 4),
        ("embedded", {"sequences_max": "many"}, 16),
        ("vllm", {}, 0),
        ("vllm", {"max_num_seqs": "64"}, 64),
        # Each copy has the limit for itself.
        ("vllm", {"max_num_seqs": "64", "data_parallel_size": "2"}, 128),
        ("sglang", {"max_running_requests": "8"}, 8),
        ("tensorrt_llm", {"max_batch_size": "32"}, 32),
        ("mock", {}, 0),
        ("unknown", {"max_num_seqs": "64"}, 0),
    ],
)
def test_the_limit_of_sequences_is_the_engine_s_option(
    driver: str, options: dict[str, str], expected: int
) -> None:
    engine = EngineSettings(driver=driver, options=options)
    assert sequences_max(a_spec(engine=engine)) == expected


def read_prompt(admission: ReplicaAdmission, tokens: int, at_s: float, took_s: float) -> None:
    reservation = admission.admit(
        tokens, 10, pending_prefill_tokens=tokens, generates_for="a", now_s=at_s
    )
    assert reservation is not None
    reservation.begin_prefill(at_s)
    reservation.first_token(at_s + took_s, is_timely=True)
    reservation.release(at_s + took_s + 1.0)


def ns_per_token(admission: ReplicaAdmission, now_s: float) -> int:
    return admission.load(now_s=now_s, is_ping=True).prefill_ns_per_token


def test_loads_have_the_time_per_token_of_the_prompts_that_were_read() -> None:
    admission = ReplicaAdmission(1_000_000, sequences_max=4)
    for number in range(5):
        assert bool(ns_per_token(admission, 10.0 * number)) == (number >= 3)
        read_prompt(admission, 1000 * (number + 1), 10.0 * number, 0.5 * (number + 1))
    assert ns_per_token(admission, 50.0) == pytest.approx(500_000, rel=1e-3)
    assert admission.load(now_s=50.0).prefill_ns_per_token == 0, "only pings have it"
    assert ns_per_token(admission, 500.0) == 0, "long ago"


def test_a_prompt_counts_from_the_end_of_the_one_before_it() -> None:
    admission = ReplicaAdmission(1_000_000, sequences_max=16)
    waiting = []
    for _ in range(4):
        reservation = admission.admit(1000, 10, generates_for="a", now_s=1.0)
        assert reservation is not None
        reservation.begin_prefill(1.0)
        waiting.append(reservation)
    for number, reservation in enumerate(waiting, 1):
        reservation.first_token(1.0 + number, is_timely=True)
    assert ns_per_token(admission, 6.0) == 1_000_000


def test_what_says_nothing_of_the_engines_pace_is_not_measured() -> None:
    admission = ReplicaAdmission(1_000_000, sequences_max=1)
    item = admission.admit(1000, 10, generates_for="a", item=BatchItem(0))
    assert item is not None
    first, waiting = admit(admission, "a"), admit(admission, "b")
    assert first is not None
    assert waiting is not None
    for reservation in (item, waiting):
        reservation.begin_prefill(1.0)
    for reservation in (item, first, waiting):
        reservation.first_token(9.0, is_timely=True)
        reservation.release(10.0)
    whole_answer, cancelled = admit(admission, "a"), admit(admission, "b")
    assert whole_answer is not None
    assert cancelled is not None
    whole_answer.begin_prefill(10.0)
    whole_answer.first_token(19.0)
    cancelled.release(20.0)
    assert not admission._pace._prompts
