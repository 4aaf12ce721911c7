"""Which layers share arrays, where each one's cache lies, and how long pages live."""

from __future__ import annotations

import pytest

from jaxllm.cache.groups import CacheGroup, Place, cache_groups, layer_places, merged
from jaxllm.cache.layer import (
    LatentKV,
    LayerCache,
    PagedKV,
    RecurrentState,
    SharedKV,
    attention_cache,
    own_cache,
)

PLAIN = PagedKV(8, 64, 64)
WIDE = PagedKV(4, 128, 128)
STATE = RecurrentState(((16, 64, 64), (16, 4)))


def groups_of(*layers: LayerCache) -> tuple[CacheGroup, ...]:
    return cache_groups(layers, [layer.window for layer in layers])


def windowed(window: int) -> PagedKV:
    return PagedKV(8, 64, 64, window)


def test_groups_that_keep_all_pages_stand_first_then_wide_windows_and_states_last() -> None:
    groups = groups_of(STATE, windowed(8), PLAIN, windowed(16), STATE, windowed(8))
    assert [(group.window, group.layers) for group in groups] == [
        (None, (2,)),
        (16, (3,)),
        (8, (1, 5)),
        (None, (0, 4)),
    ]
    assert groups[-1].spec == STATE


def test_unlike_heads_are_groups_of_their_own_whatever_their_windows() -> None:
    groups = groups_of(PLAIN, WIDE, PLAIN)
    assert [group.layers for group in groups] == [(0, 2), (1,)]
    assert groups_of(*[LatentKV(512, 64)] * 3) == (CacheGroup(LatentKV(512, 64), (0, 1, 2)),)


def test_what_only_weights_need_parts_no_group() -> None:
    scaled = PLAIN.scaled((("k_scale", (1,)), ("v_scale", (1,))))
    turned = PagedKV(8, 64, 64, order=tuple(range(64)))
    assert [group.layers for group in groups_of(PLAIN, scaled, turned)] == [(0, 1, 2)]


def test_pages_live_as_long_as_the_layer_that_sees_furthest_among_their_readers() -> None:
    groups = groups_of(windowed(8), SharedKV(0, 32), SharedKV(0, 8), PLAIN, SharedKV(3, 8))
    assert [(group.window, group.layers) for group in groups] == [(None, (3,)), (32, (0,))]
    assert groups_of(windowed(8), SharedKV(0))[0].window is None


def test_a_layer_that_shares_keys_has_the_place_of_their_owner() -> None:
    layers = (windowed(8), PLAIN, STATE, SharedKV(1), windowed(8), SharedKV(4, 8))
    places = layer_places(groups_of(*layers), layers, range(6))
    assert places == (
        Place(1, 0),
        Place(0, 0),
        Place(2, 0),
        Place(0, 0),
        Place(1, 1),
        Place(1, 1),
    )


def test_places_of_a_stage_count_its_own_layers() -> None:
    layers = (PLAIN, windowed(8), PLAIN, PLAIN, windowed(8), STATE)
    places = layer_places(groups_of(*layers), layers, range(3, 6))
    assert places == (Place(0, 0), Place(1, 0), Place(2, 0))


def test_windows_that_no_sequence_exceeds_join_the_group_that_keeps_all() -> None:
    groups = groups_of(PLAIN, windowed(8), windowed(16), WIDE)
    whole, numbers = merged(groups, 100)
    assert whole == groups and numbers == ((0,), (1,), (2,), (3,))
    joined, numbers = merged(groups, 16)
    assert [(group.window, group.layers) for group in joined] == [
        (None, (0, 2)),
        (None, (3,)),
        (8, (1,)),
    ]
    assert sorted(numbers) == [(0, 2), (1,), (3,)]


def test_what_a_layer_attends_to_is_its_owners() -> None:
    layers = (STATE, PLAIN, SharedKV(1))
    assert attention_cache(layers) is attention_cache(layers, 2) is PLAIN
    assert own_cache(layers, 0) is STATE
    with pytest.raises(ValueError, match="layer 0 does not attend"):
        attention_cache(layers, 0)
    with pytest.raises(ValueError, match="no layer that attends"):
        attention_cache((STATE,))
    with pytest.raises(ValueError, match="layer 2 reads a layer that has no cache of its own"):
        own_cache((PLAIN, SharedKV(0), SharedKV(1)), 2)


def test_forms_say_what_they_refuse() -> None:
    assert PLAIN.rounding_refusal is PLAIN.move_refusal is PLAIN.prefix_refusal is None
    assert PLAIN.unrounded("as keys are exact").rounding_refusal == "as keys are exact"
    assert LatentKV(512, 64).rounding_refusal is not None
    assert STATE.rounding_refusal is None, "8 bits are for the pages beside it"
    assert STATE.move_refusal is not None and STATE.prefix_refusal is not None
