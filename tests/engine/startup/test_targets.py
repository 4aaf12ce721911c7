"""Kernels are chosen for a target, which needs no device. A back end for another kind of card is
one module and one entry in its op's table."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from jaxllm.cache.backends import Shapes, choose_backend, tile_tokens
from jaxllm.engine.engine import Engine
from jaxllm.engine.startup import model_plan
from jaxllm.sampling.options import SamplingParams
from pallas_kernels import add_norm, all_reduce, draw, matmul, paged_decode, paged_extend
from pallas_kernels.backends import Backends
from pallas_kernels.draw import reference as draw_reference
from pallas_kernels.paged_decode import reference as decode_reference
from pallas_kernels.paged_extend import reference as extend_reference
from pallas_kernels.target import ANYWHERE, HOPPER, PORTABLE, Needs, Target
from tests.engine.conftest import run
from tests.engine.runtime.cards import CARDS
from tests.targets import A100, H200, RTX_5090, TPU

NAME = "mosaic_more"
NEEDS = Needs("an RTX 5090", capabilities=("12.0",), features=("tma",), shared_memory=99 << 10)
LOGITS = jax.ShapeDtypeStruct((1, 1024), jnp.float32)
HEADS = Shapes(jnp.bfloat16, 96, 64, 1)


@pytest.fixture
def more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back ends of attention and of draws for one more kind of card: what a new file would define,
    and its entry in the table."""
    attention = {"head_dims": lambda pages: (8, 128), "TILE_TOKENS": 32}
    for op, facts in (
        (paged_decode, {**attention, "decode_attention": decode_reference.decode_attention}),
        (paged_extend, {**attention, "extend_attention": extend_reference.extend_attention}),
        (draw, {"draw": draw_reference.draw}),
    ):
        module = ModuleType(f"{op.__name__}.{NAME}")
        vars(module).update(facts)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(op.BACKENDS.needs, NAME, NEEDS)


@pytest.mark.usefixtures("more")
def test_a_back_end_for_another_card_is_chosen_there_and_nowhere_else() -> None:
    backend = choose_backend(RTX_5090, HEADS)
    assert (backend.name, backend.head_dim, backend.is_kernel) == (NAME, 128, True)
    assert backend.reason == "compute capability 12.0; heads of 96 are stored as 128, with zeros"
    assert tile_tokens(NAME) == 32
    assert draw.choose(RTX_5090, LOGITS) == NAME and draw.is_kernel(NAME)
    x, weight = jnp.ones((1, 128), jnp.bfloat16), jnp.ones(128, jnp.bfloat16)
    assert add_norm.choose(RTX_5090, x, weight) == "reference", "an op that has none for it"
    for target, attention, drawing in (
        (H200, "mosaic_gpu", "mosaic_gpu"),
        (TPU, "xla", "reference"),
        (A100, "xla", "reference"),
        (PORTABLE, "reference", "reference"),
        (Target.gpu("12.0", 170, 98 << 10), "xla", "reference"),  # too little shared memory
    ):
        assert choose_backend(target, HEADS).name == attention
        assert draw.choose(target, LOGITS) == drawing


@pytest.mark.usefixtures("more")
def test_an_engine_runs_the_back_ends_of_another_card(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 17, 3, 80, 41], [9] * 11]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    wanted = run(make_engine(), prompts, params)
    monkeypatch.setattr(model_plan, "target_of", lambda mesh: RTX_5090)
    engine = make_engine()
    assert engine.resolved.attention_backend == NAME and engine.resolved.target == RTX_5090
    assert run(engine, prompts, params) == wanted


def tables() -> Iterator[Backends]:
    """The tables of all ops."""
    for module in pkgutil.iter_modules(pallas_kernels.__path__):
        if module.ispkg:
            op = importlib.import_module(f"pallas_kernels.{module.name}")
            yield from (value for value in vars(op).values() if isinstance(value, Backends))


@pytest.mark.parametrize("card", [name for name, card in CARDS.items() if card.capability[0] != 9])
def test_a_card_without_kernels_runs_what_runs_anywhere(card: str) -> None:
    target = CARDS[card].offer
    alone = [table for table in tables() if all_reduce.TRIED not in table.needs.values()]
    assert len(alone) >= 20
    for table in alone:
        assert all(map(table.runs_anywhere, table.suited(target)))
    part = jnp.zeros((1, 256), jnp.bfloat16)
    assert all_reduce.choose(all_reduce.Group("width", 2), part) == "reference", "without inboxes"


def test_a_forced_attention_back_end_leaves_other_ops_to_the_target() -> None:
    assert choose_backend(H200, HEADS, "xla").name == "xla"
    assert draw.choose(H200, LOGITS) == "mosaic_gpu"
    x, w = (jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16) for rows in (256, 4096))
    assert matmul.find(H200, x, w) == "mosaic_gpu" and matmul.find(A100, x, w) is None


@pytest.mark.parametrize(
    ("device", "target"),
    [
        (SimpleNamespace(platform="cpu"), PORTABLE),
        (SimpleNamespace(platform="tpu"), TPU),
        (SimpleNamespace(platform="rocm", compute_capability=None), Target("rocm")),
        (
            SimpleNamespace(
                platform="gpu",
                compute_capability="9.0",
                core_count=132,
                shared_memory_per_block_optin=227 << 10,
            ),
            H200,
        ),
        (SimpleNamespace(platform="gpu", compute_capability="8.0"), Target.gpu("8.0")),
    ],
)
def test_a_target_is_what_a_device_says_of_itself(device: object, target: Target) -> None:
    assert Target.of(device) == target


def test_features_follow_from_the_compute_capability() -> None:
    assert Target.gpu("8.0").features == ("cp_async", "mma")
    assert Target.gpu("8.9").features == ("cp_async", "fp8", "mma")
    assert "wgmma" in H200.features and "wgmma" not in Target.gpu("10.0").features
    assert "tcgen05" in Target.gpu("10.3").features and "tcgen05" not in RTX_5090.features


def test_needs_are_met_by_targets_that_have_all_of_them() -> None:
    assert ANYWHERE.met_by(PORTABLE) and HOPPER.met_by(H200) and not HOPPER.met_by(RTX_5090)
    assert not Needs(platforms=("gpu",)).met_by(TPU)
    assert not Needs(features=("wgmma",)).met_by(A100)
    assert Needs(shared_memory=227 << 10).met_by(H200)
    assert not Needs(shared_memory=227 << 10).met_by(A100)


def test_a_target_survives_json() -> None:
    assert Target.of_dict(json.loads(json.dumps(dataclasses.asdict(H200)))) == H200


def test_an_op_whose_reference_refuses_is_named() -> None:
    with pytest.raises(ValueError, match="matmul has no back end for these arrays on CPU"):
        matmul.BACKENDS.choose(PORTABLE, LOGITS, LOGITS)
