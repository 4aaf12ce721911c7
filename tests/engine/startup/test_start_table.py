"""What the start-up table says: every term of the formula that sizes the pool, and what was
decided."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from flax import nnx

from benchmarks.modes import change, costs
from jaxllm.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.scheduling.chunk_planner import seconds_per_token
from jaxllm.engine.scheduling.kv_offload import Link
from jaxllm.engine.startup.budget import MemoryBudget
from jaxllm.engine.startup.memory_plan import MemoryPlan
from jaxllm.engine.startup.report import Report
from jaxllm.engine.startup.table import PROMPTS, decided_rows, link_rows, programs_rows
from jaxllm.mesh import Stage
from jaxllm.nn.linear import Linear
from jaxllm.quantisation import WeightFormat
from jaxllm.units import GIB, amount
from tests.engine.startup.decisions import Decided, decide
from tests.targets import TARGETS


class Kept(Report):
    """Keeps the table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, str] = {}

    def show_table(self, title: str, rows: list[tuple[str, str]]) -> None:
        assert len(dict(rows)) == len(rows), "a row is there twice"
        self.rows = dict(rows)


BUDGET = MemoryBudget(
    24 * GIB, 15 * GIB, 3 * GIB, shared=False, resident=GIB, spare=GIB // 2, staged=GIB // 4
)


def decided(model_dir: str, **wishes: Any) -> Decided:
    """The tiny model's decisions, with a budget of numbers that can be told apart."""
    usual: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "num_gpu_blocks_override": 96,
    }
    model, memory, lattice = decide(EngineConfig(model=model_dir, **(usual | wishes)), model_dir)
    need = replace(memory.need, page_bytes=(GIB // 64, *memory.need.page_bytes[1:]))
    return Decided(
        replace(model, need=need),
        MemoryPlan(BUDGET, need, memory.num_pages, int(1.5 * GIB)),
        lattice,
    )


def rows_of(decisions: Decided, late: int = 0) -> dict[str, str]:
    model, memory, lattice = decisions
    report = Report()
    report.seconds["Warming up"] = 1.25
    programs: Any = SimpleNamespace(
        lattice=range(60), late=range(late), executables=SimpleNamespace(lowered=7)
    )
    compiles: Any = SimpleNamespace(compiles=9, cache_hits=4)
    rows = decided_rows(model, memory, lattice.resolved, int(2.75 * GIB))
    return dict([*rows, *programs_rows([programs], compiles, report)])


def test_the_rows_of_memory_are_the_terms_of_the_formula_and_their_sum(tiny_dir: str) -> None:
    setup = decided(tiny_dir)
    rows = rows_of(setup)
    assert rows["usable memory"] == "24.00 GiB per device"
    assert rows["weights"] == "15.00 GiB per device"
    assert rows["largest step"] == "3.00 GiB reserved per device, 2.75 GiB needed"
    assert rows["sampling buffers"] == "1.00 GiB per device"
    assert rows["spare"] == "0.50 GiB per device"
    first, *taken, left = [
        float(number) for number in re.findall(r"\d+\.\d\d", rows["left for KV pages"])
    ]
    assert (first, taken, left) == (24.0, [15.0, 3.0, 1.0, 0.5, 0.25], 4.25)
    assert first - sum(taken) == left == BUDGET.for_pages / GIB
    assert rows["KV cache"] == "96 pages × 8 = 768 tokens in float32, 1.50 GiB per device"
    small = decided(tiny_dir)
    small = small._replace(memory=replace(small.memory, kv_bytes=5 * 2**20))
    assert rows_of(small)["KV cache"].endswith("5.00 MiB per device")
    assert rows["maximum concurrency"] == "6.00x at 128 tokens per request"
    assert rows["step programs"] == "60; 7 lowered, 5 compiled, 4 cached"
    late = rows_of(setup, late=20)
    assert late["step programs"] == "40, 20 more behind /ready; 7 lowered, 5 compiled, 4 cached"
    assert rows["warming up"] == "1.25 s"
    packed = decided(tiny_dir)
    budget = replace(packed.memory.budget, packing="fp8")
    packed = packed._replace(memory=replace(packed.memory, budget=budget))
    assert rows_of(packed)["weights"] == "15.00 GiB per device unpacked from fp8"


def with_spec(decisions: Decided, **changes: Any) -> Decided:
    model = decisions.model
    return decisions._replace(model=replace(model, spec=replace(model.spec, **changes)))


def test_weights_in_few_bits_are_named_with_what_they_save(tiny_dir: str) -> None:
    plain, setup = decided(tiny_dir), decided(tiny_dir, quantization="fp8_w8a16")
    rows = rows_of(setup)
    assert "quantised weights" not in rows_of(plain)
    assert re.fullmatch(
        r"\d+ matrices in fp8 with scales of rows, inputs as they are", rows["quantised weights"]
    )
    assert re.fullmatch(r".* per device, -?\d+ tokens of KV", rows["quantisation saves"])
    body = nnx.merge(plain.model.outline.graphdef, plain.model.outline.state)
    maps = (m.weight.get_value() for _, m in nnx.iter_modules(body.layers) if isinstance(m, Linear))
    every = sum(leaf.size for leaf in jax.tree.leaves(plain.model.outline.state))
    others = 4 * (every - sum(weight.size for weight in maps))
    assert rows["other weights"] == f"{amount(others)} per device as plain numbers"
    assert rows["products of these"] == "reference (plain JAX: may be slower than 16 bits)"
    assert rows["output head"] == "plain numbers"
    head = {"lm_head": WeightFormat("int8", 16)}
    held = with_spec(setup, formats=head)
    assert rows_of(held)["output head"] == "int8, summed in float32"
    tied = {"model.embed_tokens": WeightFormat("int8", 16)}
    held = with_spec(setup, formats=tied, tied=True)
    assert rows_of(held)["output head"] == "int8, summed in float32, also the table of tokens"


@pytest.mark.parametrize(
    ("wish", "on", "slower"),
    [("int4", "mosaic_gpu", True), ("int4", "xla", False), ("fp8", "mosaic_gpu", False)],
)
def test_a_start_says_where_weights_in_few_bits_are_slower(
    tiny_dir: str, wish: str, on: str, slower: bool
) -> None:
    setup = decided(tiny_dir, quantization=wish)
    setup = setup._replace(model=replace(setup.model, target=TARGETS[on]))
    assert (rows_of(setup).get("prompts") == PROMPTS) == slower


def test_what_a_start_says_of_slower_weights_is_what_was_measured() -> None:
    measured = [cost for cost in costs() if cost.mode.startswith("weights in")]
    # By more than one machine differs from another
    slower = [cost for cost in measured if float(change(cost)[1:-2]) > 1 and change(cost)[0] == "−"]
    assert slower and {cost.mode for cost in slower} == {"weights in 4 bits"}
    tokens = [int(re.search(r"TTFT ms, prompt (\d+)", cost.load)[1]) for cost in slower]  # type: ignore[index]
    assert f"from {min(tokens)} tokens on" in PROMPTS
    most = max(1 - cost.without / cost.with_mode for cost in slower)  # type: ignore[operator]
    assert f"up to {math.ceil(100 * most)} %" in PROMPTS


def test_what_was_decided_of_memory_is_shown(tiny_dir: str) -> None:
    plain = rows_of(decided(tiny_dir))
    assert (plain["preemption"], plain["host memory"], plain["prefix caching"]) == (
        "recompute",
        "holds no pages",
        "on",
    )
    assert plain["sliding window"] == "none"
    setup = decided(tiny_dir, preemption_mode="swap", swap_space=0.5, kv_offloading_size=0.25)
    pages, cached = setup.resolved.host_pages, setup.resolved.host_cached_pages
    assert cached * 2 == pages - cached > 0
    swapping = rows_of(setup)
    assert swapping["preemption"] == "swap"
    wanted = (
        f"{pages} pages, {amount(pages * GIB // 64)}, {cached} of them for cached prefixes; "
        f"{setup.resolved.moved_pages} move at once"
    )
    assert swapping["host memory"] == wanted
    stages = setup._replace(model=replace(setup.model, stage=Stage(1, 2)))
    assert amount(2 * pages * GIB // 64) in rows_of(stages)["host memory"], "of both stages"
    assert rows_of(decided(tiny_dir, enable_prefix_caching=False))["prefix caching"] == "off"
    assert (
        rows_of(decided(tiny_dir, kv_cache_dtype="fp8"))["KV scales"]
        == "one for each token and head, computed when it is written"
    )


def test_the_link_is_shown_with_what_a_page_costs_either_way(tiny_dir: str) -> None:
    setup = decided(tiny_dir, preemption_mode="swap", swap_space=0.5)
    runner = SimpleNamespace(link=None, seconds={})
    assert link_rows(setup.model, runner) == []  # type: ignore[arg-type]
    shape = next(iter(setup.model.buckets.extend))
    runner = SimpleNamespace(
        link=Link(32, program=0.0032, page=0.0005), seconds={shape: 0.002 * shape.tokens}
    )
    assert seconds_per_token(runner.seconds) == pytest.approx(0.002)
    ((name, text),) = link_rows(setup.model, runner)  # type: ignore[arg-type]
    assert name == "link to host memory"
    assert (
        text == f"{GIB / 64 / 0.0006 / 1e9:.1f} GB/s per device: a page is loaded in 0.60 ms, "
        "alone in 3.70 ms, and computed in 16.00 ms"
    )


def test_an_engine_shows_the_table_when_it_has_started(make_engine: Callable[..., Engine]) -> None:
    report = Kept()
    engine = make_engine(report=report)
    tokens = engine.resolved.num_pages * engine.resolved.page_size
    assert report.rows["KV cache"].startswith(
        f"{engine.resolved.num_pages} pages × {engine.resolved.page_size} = {tokens} tokens"
    )
    assert {
        "usable memory",
        "weights",
        "left for KV pages",
        "preemption",
        "attention",
        "loading weights",
    } <= report.rows.keys()
