"""A node admits generations by number and tenant: what exceeds the engine waits in the routers."""

import pytest

from isochrone.wire.models.model import EngineSettings
from nodeagent.decide.requests.admission import ReplicaAdmission, TokenReservation
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
