"""Mutated HTTP through the parser wall: what passes is what another parser reads (ops/fuzz)."""

import random

import pytest

from ops.fuzz.requests import disagreement, mutated, through_the_wall

INPUTS = 1000


@pytest.mark.parametrize("seed", range(3))
def test_what_passes_the_wall_is_what_another_parser_reads(seed: int) -> None:
    chance = random.Random(seed)
    passed = 0
    for _ in range(INPUTS):
        data = mutated(chance)
        requests = through_the_wall(data, chance)
        assert not disagreement(data, requests), data
        passed += len(requests)
    assert passed > INPUTS / 20
