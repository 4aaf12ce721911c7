"""The engine with each attention back end that runs on a CPU: the same tokens, and a start-up table
that names it with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.load import load_engine
from jaxllm.engine.startup import model_plan
from jaxllm.engine.startup.report import Report
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import TINY, run
from tests.targets import TPU

PROMPTS = [list(range(1, 40)), [7, 3, 9], list(range(60, 77))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Table(Report):
    """Keeps the start-up table."""

    def show_table(self, title: str, rows: list[tuple[str, str]]) -> None:
        self.rows = dict(rows)


def test_the_fallback_answers_as_the_reference_does(make_engine: Callable[..., Engine]) -> None:
    assert run(make_engine(attention_backend="xla"), PROMPTS, PARAMS) == run(
        make_engine(), PROMPTS, PARAMS
    )


@pytest.mark.slow
def test_the_tpu_kernels_interpreted_answer_as_the_reference_does(
    make_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"head_dim": 128}))
    wanted = run(make_engine(model=str(tmp_path)), PROMPTS, PARAMS)
    monkeypatch.setattr(model_plan, "target_of", lambda mesh: TPU)
    with pltpu.force_tpu_interpret_mode():
        engine = make_engine(model=str(tmp_path))
        assert engine.resolved.attention_backend == "mosaic_tpu"
        assert run(engine, PROMPTS, PARAMS) == wanted


@pytest.mark.parametrize(("asked", "shown"), [(None, "reference (CPU)"), ("xla", "xla (as asked)")])
def test_the_start_up_table_names_the_back_end_and_why(
    tiny_dir: str, asked: str | None, shown: str
) -> None:
    report = Table()
    wishes: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "enforce_eager": True,
    }
    sizes = {"block_size": 8, "num_gpu_blocks_override": 32}
    config = EngineConfig(
        model=tiny_dir,
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=asked,
        **wishes,
        **sizes,
    )
    load_engine(config, report)
    assert report.rows["attention"] == shown


def test_a_kernel_that_cannot_run_on_this_device_is_refused_before_anything_is_loaded(
    make_engine: Callable[..., Engine],
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"mosaic_gpu needs an NVIDIA GPU of compute capability 9\.0 .* this device is cpu",
    ):
        make_engine(attention_backend="mosaic_gpu")
