"""The seeds of choices."""

from __future__ import annotations

import numpy as np

from jaxllm.engine.intake.request_factory import SEEDS_AT_ONCE, RandomSeeds, choice_seed


def test_the_seeds_of_choices_are_unrelated_to_those_of_requests_nearby_and_stay_as_they_are() -> (
    None
):
    seeds = [choice_seed(seed % 2**64, index) for seed in range(-40, 40) for index in range(8)]
    assert len(set(seeds)) == len(seeds), "no choice repeats another request's"
    assert (choice_seed(7, 0), choice_seed(7, 1), choice_seed(2**64 - 1, 2)) == (
        7,
        4649271177573249530,
        13400882341780847347,
    )


def test_seeds_drawn_many_at_a_time_are_those_drawn_one_by_one() -> None:
    alone = np.random.Generator(np.random.Philox(7))
    wanted = [int(alone.integers(2**64, dtype=np.uint64)) for _ in range(2 * SEEDS_AT_ONCE + 1)]
    seeds = RandomSeeds(7)
    assert [seeds.draw() for _ in wanted] == wanted
