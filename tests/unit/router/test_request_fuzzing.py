"""Mutated HTTP requests: what the request reader accepts, another parser reads the same way."""

import random

import pytest

from ops.fuzz.requests import find_disagreement, mutate_request, read_in_pieces

INPUTS = 1000


@pytest.mark.parametrize("seed", range(3))
def test_accepted_requests_are_read_the_same_way_by_another_parser(seed: int) -> None:
    chance = random.Random(seed)
    accepted = 0
    for _ in range(INPUTS):
        data = mutate_request(chance)
        requests = read_in_pieces(data, chance)
        assert not find_disagreement(data, requests), data
        accepted += len(requests)
    assert accepted > INPUTS / 20
