"""The lattice of compiled shapes: every legal step fits, and the shapes are few."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.scheduling.buckets import BucketError, Buckets

PLATFORMS = ("cpu", "gpu", "tpu")


def programs(buckets: Buckets) -> int:
    """The programs that the lattice compiles, samplers apart."""
    return len(buckets.decode) + len(buckets.extend)


def test_the_default_gpu_lattice_has_thirty_forwards_and_five_row_counts_of_logits() -> None:
    buckets = Buckets.build(256, 8192, "gpu")
    assert 24 <= programs(buckets) <= 30
    assert buckets.logits == (16, 64, 128, 256, 320)
    assert programs(Buckets.build(256, 2048, "gpu")) <= 27


def test_many_slots_share_the_logits_of_the_largest_step() -> None:
    """A thousand rows of 128,256 tokens take half a gigabyte, twice."""
    assert Buckets.build(1000, 8192, "gpu").logits == (16, 64, 128, 256, 1072)
    assert Buckets.build(384, 8192, "gpu").logits == (16, 64, 128, 256, 384, 448)


@pytest.mark.parametrize(("budget", "forwards"), [(256, 8), (512, 9), (2048, 11), (8192, 11)])
def test_the_cpu_lattice_has_few_programs(budget: int, forwards: int) -> None:
    """Each takes one or two seconds to compile."""
    assert programs(Buckets.build(16, budget, "cpu")) <= forwards


def test_the_first_shapes_on_a_cpu_are_the_largest_and_a_small_one_of_each_kind() -> None:
    first = Buckets.build(16, 512, "cpu").first
    assert first.decode == (1, 16)
    assert [(s.tokens, s.decodes) for s in first.extend] == [(64, 16), (512, 16)]


def test_rows_of_logits_on_a_cpu_are_no_more_than_requests() -> None:
    buckets = Buckets.build(16, 512, "cpu")
    assert buckets.logits == buckets.decode == (1, 4, 16)
    wide = buckets.fit_extend(512, 16, 0)
    assert wide.decodes + wide.chunks == 32 and buckets.logit_rows(wide) == 16
    assert buckets.closes_gaps(wide) and not buckets.closes_gaps(buckets.fit_extend(10, 1, 0))


@pytest.mark.parametrize("seqs", [1, 16, 100, 256, 1000])
def test_rows_of_logits_on_accelerators_stand_where_the_shape_has_them(seqs: int) -> None:
    for platform in ("gpu", "tpu"):
        buckets = Buckets.build(seqs, 8192, platform)
        assert not any(map(buckets.closes_gaps, buckets.extend))


def test_gpu_decode_rows_are_fine_where_a_row_costs_time() -> None:
    assert Buckets.build(256, 8192, "gpu").decode == (1, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
    assert Buckets.build(100, 8192, "gpu").decode[-3:] == (64, 96, 112)
    assert Buckets.build(512, 8192, "gpu").decode[-3:] == (256, 384, 512)


@pytest.mark.parametrize("slots", [65, 100, 250, 1000])
@pytest.mark.parametrize("make", [Buckets.build, Buckets.batch_invariant])
def test_many_rows_on_a_gpu_are_multiples_of_16(
    slots: int, make: Callable[[int, int, str], Buckets]
) -> None:
    """XLA copies other inputs of cuBLASLt's 8-bit products to larger arrays, at every product."""
    buckets = make(slots, 8000, "gpu")
    rows = [*buckets.decode, *(shape.tokens + shape.decodes for shape in buckets.extend)]
    assert [n for n in rows if n > 64 and n % 16] == []
    assert buckets.decode[-1] >= slots


def test_cpu_decode_rows_are_coarse() -> None:
    assert Buckets.build(16, 512, "cpu").decode == (1, 4, 16)
    assert Buckets.build(6, 512, "cpu").decode == (1, 4, 6)


@pytest.mark.parametrize(
    ("tokens", "decodes", "shape"),
    [
        (512, 30, (512, 32)),
        (200, 3, (352, 32)),
        (500, 60, (512, 64)),
        (1024, 13, (1088, 64)),
        (1500, 60, (1600, 64)),
        (1500, 200, (1536, 256)),
        (7936, 256, (7936, 256)),
    ],
)
def test_common_mixed_steps_pad_little(tokens: int, decodes: int, shape: tuple[int, int]) -> None:
    found = Buckets.build(256, 8192, "gpu").fit_extend(tokens, 1, decodes)
    assert (found.tokens, found.decodes) == shape


@pytest.mark.parametrize("max_num_seqs", [16, 100, 256])
def test_mixed_steps_fill_whole_tiles(max_num_seqs: int) -> None:
    mixed = [shape for shape in Buckets.build(max_num_seqs, 8192, "gpu").extend if shape.decodes]
    assert mixed
    rows = [shape.tokens + shape.decodes for shape in mixed]
    assert all(count % 128 == 0 or 512 < count <= 576 for count in rows), "or have fitting tiles"


@pytest.mark.parametrize(
    ("slots", "widest"),
    [
        (256, [(7936, 256)]),
        (512, [(7680, 512), (7936, 256)]),
        (1000, [(7184, 1008), (7680, 512), (7936, 256)]),
    ],
)
def test_the_largest_steps_have_no_rows_that_no_token_can_fill(
    slots: int, widest: list[tuple[int, int]]
) -> None:
    buckets = Buckets.build(slots, 8192, "gpu")
    assert [
        (s.tokens, s.decodes) for s in buckets.extend if 4096 < s.tokens and s.decodes
    ] == widest
    assert buckets.most_tokens(slots) == 8192 - widest[0][1]
    assert buckets.most_tokens(0) == 8192


@pytest.mark.parametrize("slots", [300, 384, 512, 1000, 2000])
def test_a_short_prompt_beside_many_decodes_costs_little_more_than_these(slots: int) -> None:
    buckets = Buckets.build(slots, 8192, "gpu")
    shape = buckets.fit_extend(400, 1, slots)
    assert shape.tokens + shape.decodes <= buckets.fit_decode(slots) + 640


def test_decodes_leave_room_for_prompts_in_small_steps() -> None:
    assert Buckets.build(256, 512, "gpu").most_tokens(256) == 512


@pytest.mark.parametrize("tokens", [50, 100, 512, 2048, 8192])
@pytest.mark.parametrize("budget", [2048, 8192])
def test_prompts_alone_carry_no_decode_rows(tokens: int, budget: int) -> None:
    buckets = Buckets.build(256, budget, "gpu")
    if tokens <= budget:
        assert buckets.fit_extend(tokens, 1, 0).decodes == 0


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 1024), st.integers(1, 40000), st.sampled_from(PLATFORMS), st.data())
def test_every_step_within_the_limits_fits_also_the_first_shapes_alone(
    seqs: int, budget: int, platform: str, data: st.DataObject
) -> None:
    buckets = Buckets.build(seqs, budget, platform)
    decodes = data.draw(st.integers(0, min(seqs, budget - 1)))
    room = min(budget - decodes, buckets.most_tokens(decodes))
    tokens = data.draw(st.integers(1, room)) if budget > decodes else 0
    chunks = data.draw(st.integers(1, min(tokens, buckets.max_chunks, seqs)))
    assert buckets.first.fit_extend(tokens, chunks, decodes) in buckets.extend
    assert buckets.first.fit_decode(decodes or 1) in buckets.decode
    shape = buckets.fit_extend(tokens, chunks, decodes)
    assert shape in buckets.extend
    assert shape.tokens >= tokens and shape.chunks >= chunks and shape.decodes >= decodes
    assert buckets.fit_decode(decodes or 1) in buckets.decode


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_most_tokens_beside_any_decodes_may_be_of_the_most_prompts(platform: str) -> None:
    for seqs in (*range(1, 162, 4), 200, 256, 500, 512, 768, 1000, 1024):
        for budget in (*range(1, 1100, 16), 2048, 4096, 5000, 8192, 9000, 16384):
            buckets = Buckets.build(seqs, budget, platform)
            for decodes in {0, 1, *(shape.decodes for shape in buckets.extend)}:
                room = buckets.most_tokens(decodes)
                assert buckets.fit_extend(room, min(room, buckets.max_chunks), decodes)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 1024), st.integers(1, 40000), st.sampled_from(PLATFORMS))
def test_shapes_are_sane_and_distinct(seqs: int, budget: int, platform: str) -> None:
    buckets = Buckets.build(seqs, budget, platform)
    most = buckets.decode[-1]
    assert list(buckets.decode) == sorted(set(buckets.decode)) and seqs <= most < seqs + 16
    assert most == seqs or (seqs > 64 and platform != "cpu")
    assert list(buckets.extend) == sorted(set(buckets.extend))
    assert budget <= buckets.max_tokens < budget + 16
    assert buckets.max_chunks == max(s.chunks for s in buckets.extend)
    assert all(
        1 <= s.chunks <= min(s.tokens, seqs, 64) and s.decodes in (0, 32, 64, 256, 512, most)
        for s in buckets.extend
    )
    rows = max(s.decodes + s.chunks for s in buckets.extend)
    assert buckets.logits[-1] == (most if platform == "cpu" else rows)
    assert list(buckets.logits) == sorted(set(buckets.logits))
    assert all(
        buckets.logit_rows(shape) in buckets.logits for shape in (*buckets.decode, *buckets.extend)
    )
    assert all(buckets.logit_rows(s) >= min(seqs, s.decodes + s.chunks) for s in buckets.extend), (
        "a step has no more requests than that"
    )
    assert programs(buckets) <= 60


@pytest.mark.parametrize(
    ("tokens", "decodes", "kept"), [(700, 0, 512), (700, 14, 512), (530, 200, 512)]
)
def test_a_few_tokens_more_than_a_shape_holds_come_in_the_next_step(
    tokens: int, decodes: int, kept: int
) -> None:
    assert Buckets.build(256, 8192, "gpu").trim(tokens, 1, decodes) == kept


@pytest.mark.parametrize("tokens", [1, 16, 40, 100, 512, 900, 1000, 2000, 8192])
def test_a_length_that_pads_little_is_not_cut(tokens: int) -> None:
    assert Buckets.build(256, 8192, "gpu").trim(tokens, 1, 0) == tokens


def test_a_cut_keeps_the_rows_that_its_chunks_need() -> None:
    buckets = Buckets.build(64, 8192, "gpu")
    assert buckets.trim(700, 1, 0) == 512
    assert buckets.trim(700, 40, 0) == 700, "512 tokens have 32 chunk rows only"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(16, 9000), st.sampled_from(PLATFORMS), st.data())
def test_a_cut_always_ends_at_a_full_shape_and_saves_rows(
    seqs: int, budget: int, platform: str, data: st.DataObject
) -> None:
    buckets = Buckets.build(seqs, budget, platform)
    decodes = data.draw(st.integers(0, min(seqs, budget - 1)))
    tokens = data.draw(st.integers(1, min(budget, buckets.most_tokens(decodes))))
    chunks = data.draw(st.integers(1, min(tokens, buckets.max_chunks)))
    kept = buckets.trim(tokens, chunks, decodes)
    assert 1 <= kept <= tokens
    if kept < tokens:
        assert buckets.fit_extend(kept, chunks, decodes).tokens == kept
        computed, rest = kept, tokens - kept
        while rest:
            part = buckets.trim(rest, 1, decodes)
            computed, rest = computed + buckets.fit_extend(part, 1, decodes).tokens, rest - part
        assert computed < buckets.fit_extend(tokens, chunks, decodes).tokens


def test_tokens_between_two_shapes_run_in_several_steps_of_the_smaller_one() -> None:
    buckets = Buckets.build(256, 8192, "gpu")
    left, steps = 6041, []
    while left:
        steps.append(buckets.trim(left, 1, 209))
        left -= steps[-1]
    assert steps == [3840, 1536, 512, 153], "7,936 for 6,041 would compute a third too much"
    assert buckets.trim(7900, 1, 209) == 7900, "which is nearly all of 8,192"


def test_what_does_not_fit_is_an_error_that_names_the_limit_and_the_remedy() -> None:
    buckets = Buckets.build(16, 512, "cpu")
    with pytest.raises(
        BucketError,
        match=r"513 tokens of 1 prompts with 0 decodes do not fit.*512, 16 and 16; "
        "raise max_num_batched_tokens",
    ):
        buckets.fit_extend(513, 1, 0)
    with pytest.raises(BucketError, match=r"17 decode rows do not fit.*has 16; raise max_num_seqs"):
        buckets.fit_decode(17)


@pytest.mark.parametrize(("seqs", "budget"), [(0, 16), (16, 0)])
def test_limits_below_one_are_refused(seqs: int, budget: int) -> None:
    with pytest.raises(BucketError, match="must be at least 1"):
        Buckets.build(seqs, budget, "cpu")


def test_a_lattice_survives_json() -> None:
    buckets = Buckets.build(256, 8192, "gpu")
    assert Buckets.from_dict(json.loads(json.dumps(buckets.to_dict()))) == buckets
