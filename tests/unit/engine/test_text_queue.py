"""The encoder's text queue: fair between requests, and every step within its token budget."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engine.encoder.text_queue import TextQueue

REQUESTS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(deadline=None, max_examples=150)
@given(REQUESTS, st.integers(1, 64))
def test_every_text_is_taken_once_and_no_step_exceeds_its_budget(
    requests: list[list[int]], tokens_max: int
) -> None:
    texts = TextQueue(tokens_max)
    for number, lengths in enumerate(requests):
        texts.add(number, lengths)
    assert texts.tokens == sum(map(sum, requests))
    read: list[tuple[int, int]] = []
    while batch := texts.next_batch():
        longest = max(requests[number][index] for number, index in batch)
        assert len(batch) == 1 or longest * len(batch) <= tokens_max
        read += batch
    assert sorted(read) == [(n, i) for n, one in enumerate(requests) for i in range(len(one))]
    assert (texts.texts, texts.tokens) == (0, 0)


@settings(deadline=None, max_examples=100)
@given(REQUESTS, st.integers(8, 64))
def test_a_request_waits_at_most_for_one_text_of_each_other(
    requests: list[list[int]], tokens_max: int
) -> None:
    texts = TextQueue(tokens_max)
    for number, lengths in enumerate(requests):
        texts.add(number, lengths)
    texts.add(99, [1])
    steps = 0
    while (99, 0) not in texts.next_batch():
        steps += 1
    assert steps <= len(requests)


def test_a_removed_request_is_forgotten() -> None:
    texts = TextQueue(10)
    texts.add(1, [4, 4, 4])
    texts.add(2, [4])
    assert (texts.texts, texts.tokens) == (4, 16)
    texts.remove(1)
    texts.remove(1)
    assert (texts.texts, texts.tokens) == (1, 4)
    assert texts.next_batch() == [(2, 0)]
    assert not texts.next_batch()
    assert texts.tokens == 0
