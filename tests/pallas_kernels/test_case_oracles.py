"""The cases that back ends are held against: names, contents, and what their oracles must obey."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.add_norm import cases as norms
from pallas_kernels.draw import cases as draws
from pallas_kernels.draw.cases import LOGITS, OPTIONS, Options, logits, possible, probabilities
from pallas_kernels.gated_matmul import GELU, SILU, Gated
from pallas_kernels.gated_matmul import cases as gated
from pallas_kernels.gated_matmul import mosaic_gpu as gated_kernel
from pallas_kernels.grouped_matmul import cases as grouped
from pallas_kernels.paged_decode import cases as decodes
from pallas_kernels.paged_extend import cases as extends
from pallas_kernels.rope_write import cases as writes
from tests.pallas_kernels.covering import SLOW, covering

OPS = {"add_norm": norms, "gated_matmul": gated, "paged_decode": decodes, "paged_extend": extends}
OPS["rope_write"] = writes
V = 512


def leaves(made: Any) -> list[np.ndarray]:
    """The arrays of a case's inputs."""
    if isinstance(made, np.ndarray):
        return [made]
    if dataclasses.is_dataclass(made):
        made = [getattr(made, each.name) for each in dataclasses.fields(made)]
    return [leaf for part in made if part is not None for leaf in leaves(part)]


@pytest.mark.parametrize("op", OPS)
def test_names_are_unique_and_inputs_repeat_by_seed(op: str) -> None:
    found = OPS[op].CASES
    assert len({case.name for case in found}) == len(found)
    for case in found[:3]:
        first, again, other = (leaves(OPS[op].inputs(case, seed)) for seed in (1, 1, 2))
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)
        assert any(a.shape != b.shape or np.any(a != b) for a, b in zip(first, other, strict=True))


def test_cases_that_are_slow_exist_and_the_others_are_not_marked() -> None:
    names = {case.name for case in (*decodes.CASES, *extends.CASES)}
    assert SLOW <= names
    covered = covering(decodes.CASES)
    marked = {case.name: bool(p.marks) for case, p in zip(decodes.CASES, covered, strict=True)}
    assert marked == {case.name: case.name in SLOW for case in decodes.CASES}
    assert covering(decodes.CASES, "xla")[0].id == "xla-one token"


@pytest.mark.parametrize("case", decodes.CASES, ids=lambda case: case.name)
def test_a_decode_expects_zeros_of_dead_rows_and_numbers_of_others(case: decodes.Case) -> None:
    made = decodes.inputs(case)
    dead = made.lengths == 0
    assert not made.expected[dead].any() and np.isfinite(made.expected).all()
    assert np.any(made.expected[~dead], axis=(1, 2)).all()
    assert made.expected.shape[-1] == made.pages.v.shape[-1]
    held = -(-made.lengths // case.page_size)
    assert made.pages.table.shape[1] == held.max() + case.spare


@pytest.mark.parametrize("case", extends.CASES, ids=lambda case: case.name)
def test_an_extends_rows_lie_apart_by_its_gap(case: extends.Case) -> None:
    made = extends.inputs(case)
    ends = made.starts + made.lengths
    np.testing.assert_array_equal(made.starts[1:] - ends[:-1], case.gap)
    assert made.starts[0] == case.gap and len(made.q) - ends[-1] == case.gap
    own = np.zeros(len(made.q), bool)
    for start, end in zip(made.starts, ends, strict=True):
        own[start:end] = True
    assert np.isfinite(made.q[own]).all() and not np.isfinite(made.q[~own]).any()
    assert not made.expected[~own].any()
    np.testing.assert_array_equal(made.kv_lengths - made.lengths, [n for n, _ in case.rows])


@pytest.mark.parametrize("kind", LOGITS)
def test_logits_are_float32_and_each_row_has_a_finite_maximum(kind: str) -> None:
    x = logits(kind, 3, V)
    assert x.shape == (3, V) and x.dtype == np.float32
    assert np.isfinite(x.max(axis=1)).all()
    np.testing.assert_array_equal(x, logits(kind, 3, V))
    assert kind == "equal" or np.any(x != logits(kind, 3, V, seed=1))


def test_kinds_of_logits_are_what_their_names_say() -> None:
    made = {kind: logits(kind, 2, V) for kind in LOGITS}
    assert np.ptp(made["equal"]) == 0
    assert (np.diff(made["rising"], axis=1) >= 0).all()
    assert len(np.unique(made["ties"])) < 30
    assert 3 < made["spread"].std() / made["flat"].std() < 5
    assert made["head"].max() == 18 and np.sum(made["head"][0] > 6) > 100
    assert np.isneginf(made["negative"]).any() and made["negative"].max() < -9000
    places = np.argsort(-made["clustered"][0])[:3]
    assert (places % 128 == 0).all()


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("name", OPTIONS)
def test_probabilities_sum_to_one_over_the_possible_tokens(kind: str, name: str) -> None:
    row, options = logits(kind, 1, V)[0], OPTIONS[name]
    keep, p = possible(row, options), probabilities(row, options)
    assert keep.any() and abs(p.sum() - 1) < 1e-12
    assert not p[~keep].any() and (p >= 0).all()
    assert not keep[np.isneginf(row)].any()
    wider = possible(row, options, slack=1e-3)
    assert (wider | ~keep).all(), "slack leaves a token out"


def test_a_greedy_row_may_draw_its_first_maximum_alone() -> None:
    row = np.array([1, 3, 3, 2], np.float32)
    assert probabilities(row, OPTIONS["greedy"]).tolist() == [0, 1, 0, 0]
    assert probabilities(row, OPTIONS["banned, greedy"]).tolist() == [0, 0, 1, 0]


@settings(max_examples=30)
@given(k=st.integers(1, 40), seed=st.integers(0, 99))
def test_top_k_keeps_k_of_different_logits_and_all_ties(k: int, seed: int) -> None:
    row = np.random.default_rng(seed).permutation(64).astype(np.float32) / 8
    keep = possible(row, Options(top_k=k))
    assert keep.sum() == k and row[keep].min() > row[~keep].max()
    pairs = np.floor(row * 4)
    assert possible(pairs, Options(top_k=k)).sum() == k + k % 2


@settings(max_examples=30)
@given(p=st.floats(0.01, 0.99), seed=st.integers(0, 99))
def test_top_p_keeps_the_fewest_values_that_reach_its_mass(p: float, seed: int) -> None:
    row = logits("spread", 1, 64, seed)[0]
    keep, mass = possible(row, Options(top_p=p)), probabilities(row, Options())
    least = np.flatnonzero(keep)[row[keep].argmin()]
    assert mass[keep].sum() >= np.float32(p) - 1e-9
    assert mass[keep].sum() - mass[least] < np.float32(p) + 1e-9
    assert keep.all() or row[keep].min() > row[~keep].max()


@settings(max_examples=30)
@given(p=st.floats(0.001, 0.9), temperature=st.floats(0.3, 3), seed=st.integers(0, 99))
def test_min_p_is_a_ratio_to_the_likeliest_token(p: float, temperature: float, seed: int) -> None:
    row = logits("flat", 1, 64, seed)[0]
    options = Options(min_p=p, temperature=temperature)
    plain = probabilities(row, dataclasses.replace(options, min_p=0.0))
    ratio = plain / plain.max()
    keep = possible(row, options)
    assert (ratio[keep] > p * (1 - 1e-5)).all() and (ratio[~keep] < p * (1 + 1e-5)).all()


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    row = logits("flat", 1, V)[0]
    tops = [probabilities(row, Options(temperature=t)).max() for t in (0.25, 1.0, 4.0)]
    assert tops[0] > tops[1] > tops[2]


def test_options_become_columns_of_their_types() -> None:
    options = [OPTIONS["banned"], OPTIONS["three filters"]]
    x = logits("flat", 2, V)
    rows = draws.rows_of(options, x)
    assert rows.banned_BK.tolist() == [[-1, int(x[0].argmax()), -1], [-1, -1, -1]]
    assert rows.top_k_B.tolist() == [0, 100] and rows.top_k_B.dtype == np.int32
    assert rows.key_B2.dtype == np.uint32 and np.any(rows.key_B2[0] != rows.key_B2[1])
    floats = (rows.temperature_B, rows.top_p_B, rows.min_p_B)
    assert all(column.dtype == np.float32 for column in floats)
    np.testing.assert_allclose([column[1] for column in floats], [0.8, 0.95, 0.02], rtol=1e-6)


def norm_of(case: norms.Case, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    made = norms.inputs(case)
    return norms.expected(case, *(x.astype(dtype) for x in (made.x, made.delta, made.weight)))


def test_a_norm_has_one_for_its_mean_square_before_the_weight() -> None:
    case = norms.Case(name="", rows=3, width=64, eps=0.0, growth=5)
    total, norm = norm_of(case)
    plain = norm / norms.inputs(case).weight
    np.testing.assert_allclose((plain**2).mean(axis=1), 1)
    assert total.std(axis=1)[2] > 500 * total.std(axis=1)[0]


def test_rows_of_zero_are_normed_to_zero() -> None:
    total, norm = norm_of(norms.Case(name="", rows=2, width=8, zero=True))
    assert not total.any() and not norm.any()


def test_sums_are_rounded_to_their_type_before_the_norm() -> None:
    case = norms.Case(name="", rows=2, width=64)
    total, _ = norm_of(case, "float16")
    np.testing.assert_array_equal(total.astype(np.float16), total)


@pytest.mark.parametrize(
    ("gating", "gate", "wanted"),
    [
        (SILU, 0.0, 0.0),
        (SILU, 1.0, 0.7310585786),
        (SILU, -200.0, 0.0),
        (GELU, 0.0, 0.0),
        (GELU, 1.0, 0.8411919906),
        (GELU, -200.0, 0.0),
    ],
)
def test_a_gated_product_is_the_gates_activation_times_up(
    gating: Gated, gate: float, wanted: float
) -> None:
    x, w = np.array([[1.0, 2.0]]), np.array([[gate, 0.0], [0.0, 1.5]])
    np.testing.assert_allclose(gated.expected(x, w, gating), [[3 * wanted]], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", gated.MODEL_SHAPES)
def test_the_gated_kernel_takes_every_models_weight(model: str) -> None:
    outputs, inputs = gated.MODEL_SHAPES[model]
    for rows in (1, 64, 257, 8192):
        sizes = gated_kernel.tuning_of(rows, outputs, inputs)
        assert sizes.n % 16 == 0 and sizes.rows in (64, 128, 192, 256)


@pytest.mark.parametrize("model", grouped.MODEL_SHAPES)
def test_a_models_experts_are_in_whole_rows_of_the_tensor_cores(model: str) -> None:
    shape = grouped.MODEL_SHAPES[model]
    assert shape.width % 64 == shape.inner % 64 == 0
    assert shape.choices < shape.experts


@pytest.mark.parametrize("case", writes.CASES, ids=lambda case: case.name)
def test_tokens_that_are_kept_have_places_of_their_own(case: writes.Case) -> None:
    made = writes.inputs(case)
    kept = made.page < case.num_pages
    places = made.page[kept] * case.page_size + made.offset[kept]
    assert kept.sum() == case.kept and len(np.unique(places)) == case.kept
    queries, k, v = made.expected
    for pool, wanted in ((made.k_pages, k), (made.v_pages, v)):
        same = np.all(pool == wanted, axis=(1, 3))
        assert (~same).sum() == case.kept
        assert not same[made.page[kept], made.offset[kept]].any()
    assert queries.shape == (case.kept + case.dropped, case.heads, case.head_dim)


def test_a_rotation_keeps_norms_and_values_are_written_as_they_are() -> None:
    case = writes.Case(name="", kept=6)
    made = writes.inputs(case)
    q, _, v = made.expected
    np.testing.assert_allclose(
        np.linalg.norm(q, axis=-1), np.linalg.norm(made.qkv[:, : case.heads], axis=-1), rtol=1e-6
    )
    written = v[made.page, :, made.offset]
    np.testing.assert_array_equal(written, made.qkv[:, case.heads + case.kv_heads :])


def test_numbers_beyond_a_heads_width_stay_zero() -> None:
    case = next(case for case in writes.CASES if case.dim is not None)
    q = writes.inputs(case).expected[0]
    halves = q.reshape(*q.shape[:-1], 2, case.head_dim // 2)
    assert not halves[..., case.dim // 2 :].any() and np.all(np.any(halves[..., :48], axis=-1))
