"""Items of batches, which have the lowest priority, give way to the prompts of clients."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.scheduler.batch import Batch, StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.fair_queue import PRIORITY_LOWEST
from nodeagent.engine.scheduler.prefill_budget import PrefillBudget
from tests.unit.engine.test_batch_scheduler import play
from tests.unit.engine.test_fair_queue import request

STEPS_MAX = 3000


def make(sequences: int = 4, interval_s: float = float("inf")) -> BatchScheduler:
    limits = StepLimits(batch_tokens_max=64, sequences_max=sequences)
    return BatchScheduler(limits, BlockPool(64), PrefillBudget(interval_s))


def numbers(batch: Batch) -> tuple[list[int], list[int]]:
    """Return the numbers of the sequences that decode, and of those whose prompt is computed."""
    decodes = [chunk.sequence.number for chunk in (*batch.decodes, *batch.verifies)]
    return sorted(decodes), sorted(chunk.sequence.number for chunk in batch.prefills)


def with_items(scheduler: BatchScheduler, count: int) -> None:
    """Submit items, and compute their prompts."""
    for number in range(count):
        scheduler.submit(request(number, tenant=b"batch", priority=PRIORITY_LOWEST))
    for _ in range(count):
        play(scheduler, scheduler.next_batch())


def test_items_pause_while_a_clients_prompt_is_computed() -> None:
    scheduler = make()
    with_items(scheduler, 2)
    scheduler.submit(request(8, prompt=100, tenant=b"client"))
    for _ in range(2):
        batch = scheduler.next_batch()
        assert numbers(batch) == ([], [8]), "the prompt alone, though items decode"
        play(scheduler, batch)
    assert numbers(scheduler.next_batch()) == ([0, 1, 8], [])


def test_items_of_another_tenant_do_not_make_a_clients_prompts_short() -> None:
    """Its tenant counted as a small one beside that of the items, whose steps are kept short for
    the small one's next prompt: so the next prompt was itself cut into pieces."""
    scheduler = BatchScheduler(StepLimits(256, 8), BlockPool(64), PrefillBudget(0.25))
    scheduler.prefill_budget.record_step(200, 0, 0.1)
    scheduler.prefill_budget.record_step(0, 4, 0.01)
    with_items(scheduler, 4)
    for number in (8, 9):
        scheduler.submit(request(number, prompt=100, tenant=b"client", output=20))
        batch = scheduler.next_batch()
        assert numbers(batch) == ([8] * (number - 8), [number])
        assert batch.prefill_tokens == 100
        play(scheduler, batch)


def test_an_items_prompt_waits_for_a_clients() -> None:
    scheduler = make()
    scheduler.submit(request(0, tenant=b"batch", priority=PRIORITY_LOWEST))
    scheduler.submit(request(1, tenant=b"client"))
    seen = []
    for _ in range(2):
        batch = scheduler.next_batch()
        seen.append(numbers(batch))
        play(scheduler, batch)
    assert seen == [([], [1]), ([1], [0])]


def test_a_client_without_a_slot_pauses_no_item() -> None:
    scheduler = make(sequences=2)
    scheduler.submit(request(0, tenant=b"client", output=50))
    scheduler.submit(request(1, tenant=b"client", output=50))
    play(scheduler, scheduler.next_batch())
    scheduler.remove(scheduler.running[0])
    with_items(scheduler, 1)
    # Earlier in the queue than the client that comes now, so it is not preempted for it.
    scheduler.running[-1].virtual_start = -1
    scheduler.submit(request(9, tenant=b"client"))
    decodes, prompts = numbers(scheduler.next_batch())
    assert (len(decodes), prompts) == (2, [])


def test_steps_of_items_prompts_alone_are_short() -> None:
    scheduler = make(interval_s=1.0)
    scheduler.prefill_budget.record_step(20, 0, 0.4)
    scheduler.submit(request(0, prompt=60, tenant=b"batch", priority=PRIORITY_LOWEST))
    assert sum(chunk.tokens for chunk in scheduler.next_batch().prefills) == 16, "a block"
    clients = make(interval_s=1.0)
    clients.prefill_budget.record_step(20, 0, 0.4)
    clients.submit(request(0, prompt=60, tenant=b"client"))
    assert sum(chunk.tokens for chunk in clients.next_batch().prefills) == 60


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 20), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=16,
    )
)
def test_all_finish_and_no_item_runs_beside_a_clients_prompt(
    requests: list[tuple[int, int, int, bool]],
) -> None:
    scheduler = make()
    for number, (prompt, output, tenant, is_item) in enumerate(requests):
        priority = PRIORITY_LOWEST if is_item else 50
        params = {"tenant": b"%d" % tenant, "priority": priority}
        scheduler.submit(request(number, prompt=prompt, output=output, **params))
    for _ in range(STEPS_MAX):
        if not scheduler.has_work:
            break
        batch = scheduler.next_batch()
        assert batch.chunks
        of_clients = [chunk for chunk in batch.prefills if not chunk.sequence.yields]
        assert not of_clients or not any(chunk.sequence.yields for chunk in batch.chunks)
        play(scheduler, batch)
    assert not scheduler.has_work
    assert scheduler.pool.free_blocks == scheduler.pool.total
