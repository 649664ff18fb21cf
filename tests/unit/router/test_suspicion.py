"""Which requests are refused because engines failed while processing them."""

import msgspec

from isochrone.wire.peers.suspicions import SUSPICION_ROWS_MAX, EngineLoss, FleetSuspicions
from router.decide.admission.suspicion import (
    FINGERPRINTS_MAX,
    PROGRESS_TOKENS_MIN,
    SuspectTable,
)
from router.loops.share_outboxes import OutboxSharer
from router.poison_guard import PoisonGuard
from router.processes import WorkerPool
from router.recording.metrics import Metrics
from router.sharing.key_use_sharing import KeyUseOutbox
from router.sharing.prompt_sharing import PromptOutbox
from router.sharing.suspicion_sharing import (
    SharedSuspicions,
    SuspicionOutbox,
    from_fleet,
    to_fleet,
)

KEY = b"k" * 32
REFUSAL_S = 600.0


def a_table() -> SuspectTable:
    return SuspectTable(KEY, REFUSAL_S)


def a_loss(
    sent_at_s: float, lost_at_s: float, replica: str = "r1", name: bytes = b"f"
) -> EngineLoss:
    return EngineLoss(name, "acme", replica, sent_at_s, lost_at_s)


def test_a_request_is_refused_after_two_lost_engines_and_for_a_while() -> None:
    table = a_table()
    assert (table.is_suspect(b"f", 0.0), table.refused_for_s(b"f", 0.0)) == (False, 0.0)
    table.record_loss(a_loss(0.0, 1.0))
    assert (table.is_suspect(b"f", 1.0), table.refused_for_s(b"f", 1.0)) == (True, 0.0)
    table.record_loss(a_loss(1.5, 2.0, "r2"))
    assert table.refused_for_s(b"f", 12.0) == REFUSAL_S - 10.0
    assert not table.is_suspect(b"f", 2.0 + REFUSAL_S)
    assert table.refused_for_s(b"f", 2.0 + REFUSAL_S) == 0.0
    assert len(table) == 0 and not table.has_suspects_of("acme")


def test_equal_requests_that_ran_on_one_engine_count_its_loss_once() -> None:
    table = a_table()
    for sent_at_s in (0.0, 0.5, 0.9):
        table.record_loss(a_loss(sent_at_s, 1.0))
    assert table.refused_for_s(b"f", 1.0) == 0.0
    # The replica's next engine.
    table.record_loss(a_loss(1.1, 1.2))
    assert table.refused_for_s(b"f", 1.2) > 0.0


def at_tokens(loss: EngineLoss, sent: int, lost: int) -> EngineLoss:
    return msgspec.structs.replace(loss, sent_token=sent, lost_token=lost)


def test_a_request_that_came_further_on_its_next_engine_is_not_refused_once() -> None:
    table = a_table()
    table.record_loss(at_tokens(a_loss(0.0, 1.0, "r1"), 0, 10))
    # A bystander of two losses: the rest of its answer was on its way.
    table.record_loss(at_tokens(a_loss(1.1, 2.0, "r2"), 10, 10 + PROGRESS_TOKENS_MIN))
    assert table.refused_for_s(b"f", 2.0) == 0.0 and table.is_suspect(b"f", 2.0)
    # A poison that fails later each time costs one engine more than others, and no further one.
    table.record_loss(at_tokens(a_loss(2.1, 3.0, "r1"), 14, 40))
    assert table.refused_for_s(b"f", 3.0) > 0.0


def test_a_request_that_makes_engines_fail_at_the_same_token_is_refused() -> None:
    for sent, lost in ((5, 5), (5, 5 + PROGRESS_TOKENS_MIN - 1), (0, 5), (0, 0), (0, 8)):
        table = a_table()
        table.record_loss(at_tokens(a_loss(0.0, 1.0, "r1"), 0, 5))
        table.record_loss(at_tokens(a_loss(1.1, 2.0, "r2"), sent, lost))
        assert table.refused_for_s(b"f", 2.0) > 0.0, (sent, lost)


def test_an_answer_clears_a_request_and_only_that_one() -> None:
    table = a_table()
    for name in (b"f", b"g"):
        table.record_loss(a_loss(0.0, 1.0, name=name))
    table.record_answer(b"f")
    assert table.has_suspects_of("acme")
    table.record_loss(a_loss(2.0, 3.0, "r2"))
    assert table.refused_for_s(b"f", 3.0) == 0.0
    table.record_loss(a_loss(2.0, 3.0, "r2", name=b"g"))
    assert table.refused_for_s(b"g", 3.0) > 0.0
    table.record_answer(b"f")
    table.record_answer(b"g")
    table.record_answer(b"unknown")
    assert len(table) == 0 and not table.has_suspects_of("acme")


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    table = a_table()
    for number in range(FINGERPRINTS_MAX + 3):
        table.record_loss(a_loss(number, number + 0.5, name=number.to_bytes(4, "big")))
        assert len(table) <= FINGERPRINTS_MAX
    now_s = 0.0
    assert [table.is_suspect(n.to_bytes(4, "big"), now_s) for n in range(4)] == [False] * 3 + [True]


def test_a_fingerprint_is_of_tenant_deployment_path_and_body_under_a_key() -> None:
    parts = ("acme", "d-1", "/v1/completions")
    first = a_table().fingerprint(*parts, b"body")
    assert first == a_table().fingerprint(*parts, b"body")
    others = {
        a_table().fingerprint("acm", "ed-1", "/v1/completions", b"body"),
        a_table().fingerprint("other", "d-1", "/v1/completions", b"body"),
        a_table().fingerprint("acme", "d-1", "/v1/chat/completions", b"body"),
        a_table().fingerprint(*parts, b"body "),
        SuspectTable(b"other", REFUSAL_S).fingerprint(*parts, b"body"),
    }
    assert len(others) == 5 and first not in others


async def test_routers_tell_each_other_of_losses_whatever_their_clocks_say() -> None:
    first, second = SuspicionOutbox(), a_table()
    guard = PoisonGuard(second, Metrics(), lambda: 0.0)
    links: list[FleetSuspicions] = []
    is_connected = False

    async def send(message: msgspec.Struct) -> bool:
        if is_connected:
            frame = msgspec.msgpack.encode(message)
            links.append(msgspec.msgpack.decode(frame, type=FleetSuspicions))
        return is_connected

    own, workers = SuspicionOutbox(), WorkerPool(0, send, lambda: None, lambda _: None, 1.0)
    now_s = 1000.0
    sharer = OutboxSharer(
        prompts=PromptOutbox(),
        suspicions=own,
        parent=None,
        workers=workers,
        fleet_suspicions=first,
        send=send,
        clock=lambda: now_s,
        take_key_use=list,
        key_use=KeyUseOutbox(),
    )
    own.add(SharedSuspicions((a_loss(998.0, 999.0),)))
    await sharer.run_once()
    assert not links
    # It is told once the scheduler is there, with what a worker process has seen.
    is_connected, now_s = True, 1010.0
    first.add(SharedSuspicions((EngineLoss(b"f", "acme", "r2", 1008.0, 1009.0, 3, 3),)))
    await sharer.run_once()
    await sharer.run_once()
    (message,) = links
    assert [(loss.lost_ago_s, loss.ran_s) for loss in message.losses] == [(11.0, 1.0), (1.0, 1.0)]
    guard.learn(from_fleet(message, 50.0))
    assert second.refused_for_s(b"f", 50.0) == REFUSAL_S - 1.0
    own.add(SharedSuspicions(cleared=(b"f",)))
    await sharer.run_once()
    guard.learn(from_fleet(links[-1], 51.0))
    assert not second.is_suspect(b"f", 51.0)


def test_what_routers_are_to_be_told_is_bounded() -> None:
    outbox = SuspicionOutbox()
    row = EngineLoss(b"f", "acme", "r1", 0.0, 1.0)
    for _ in range(3):
        outbox.add(SharedSuspicions((row,) * SUSPICION_ROWS_MAX, (b"f",) * SUSPICION_ROWS_MAX))
    shared = outbox.take()
    assert shared is not None and len(shared.losses) == len(shared.cleared) == SUSPICION_ROWS_MAX
    frame = msgspec.msgpack.encode(to_fleet(shared, 2.0))
    assert msgspec.msgpack.decode(frame, type=FleetSuspicions)
    assert outbox.take() is None


def test_processes_of_a_router_share_losses_and_clearings() -> None:
    table, outbox = a_table(), SuspicionOutbox()
    guard = PoisonGuard(table, Metrics(), lambda: 0.0)

    def share() -> None:
        message = outbox.take()
        assert message is not None
        guard.learn(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=SharedSuspicions))

    assert outbox.take() is None
    # Equal requests in two processes, on one engine: one loss.
    table.record_loss(a_loss(0.0, 1.0))
    outbox.add(SharedSuspicions((a_loss(0.5, 1.1),)))
    share()
    assert table.refused_for_s(b"f", 2.0) == 0.0
    outbox.add(SharedSuspicions((a_loss(1.5, 2.0, "r2"),)))
    share()
    assert table.refused_for_s(b"f", 2.0) == REFUSAL_S
    outbox.add(SharedSuspicions(cleared=(b"f",)))
    share()
    assert len(table) == 0
