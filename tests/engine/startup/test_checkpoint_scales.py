"""A checkpoint's own scales of keys and values: used for 8-bit pages, refused where they are
nonsense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.engine.engine import Engine
from jaxllm.sampling.options import SamplingParams
from tests.by_layer import by_layer
from tests.engine.conftest import Outcome, outcomes
from tests.engine.startup.test_start_table import Kept
from tests.engine.test_invariants import PROMPTS
from tests.models.test_kv_scales import MODELOPT
from tests.weights.scaled import BY_HEAD, HEADS, LLAMA, STORED, by_head, checkpoint, named

MakeEngine = Callable[..., Engine]
SOME = PROMPTS[1::2]
PARAMS = [SamplingParams(temperature=1.0, seed=7, max_tokens=8, ignore_eos=True, logprobs=3)] * len(
    SOME
)


def served(make_engine: MakeEngine, model: str, **overrides: Any) -> tuple[list[Outcome], Engine]:
    engine = make_engine(model=model, load_format="auto", kv_cache_dtype="fp8", **overrides)
    found = outcomes(engine, SOME, PARAMS)
    engine.scheduler.check()
    return found, engine


@pytest.mark.slow
def test_pages_are_written_by_the_checkpoints_scales(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, named("k_scale", "v_scale") | {"0.self_attn.q_scale": 1})
    report = Kept()
    alone, engine = served(make_engine, path, enable_prefix_caching=False, report=report)
    for layer, pool in enumerate(by_layer(engine.runner.kv)[2]):
        written = np.asarray(pool, np.float32)
        for side in range(2):
            assert set(np.unique(written[:, :, side])) == {np.float32(0), STORED[layer, side]}
    assert report.rows["KV scales"] == "the checkpoint's"
    own, _ = served(make_engine, str(LLAMA))
    for found, other in zip(alone, own, strict=True):
        assert found.logprobs[0].top != other.logprobs[0].top, (
            "a token's own scale gives something else"
        )
        assert abs(found.logprobs[0].logprob - other.logprobs[0].logprob) < 1


@pytest.mark.parametrize("shards", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_each_head_is_written_by_its_own_scale(
    make_engine: MakeEngine, tmp_path: Path, shards: int
) -> None:
    path, prompts_alone = (
        checkpoint(tmp_path, by_head((HEADS, 1, 1))),
        [SamplingParams(temperature=0, max_tokens=1)] * len(SOME),
    )
    pools = []
    for dtype in ("fp8", "auto"):
        engine = make_engine(
            model=path, load_format="auto", kv_cache_dtype=dtype, tensor_parallel_size=shards
        )
        outcomes(engine, SOME, prompts_alone)
        pools.append(engine.runner.kv)
    narrow, exact = pools
    stored = np.asarray(jnp.asarray(BY_HEAD, jnp.bfloat16), np.float32).repeat(
        max(1, shards // HEADS), axis=2
    )
    k, v, own = by_layer(narrow)
    for pool, scales in zip(own, stored, strict=True):
        found = np.asarray(pool, np.float32)  # [P, heads, 2, C]
        assert ((found == 0) | (found == scales.T[:, :, None])).all() and (
            found > 0
        ).sum() == 2 * len(scales.T) * sum(map(len, SOME))
    # What the first layer writes depends on no page.
    for side, (pages, wide) in enumerate(
        zip((k[0], v[0]), (x[0] for x in by_layer(exact)), strict=True)
    ):
        scale = np.asarray(own[0], np.float32)[:, :, side, :, None]
        rounded, wanted = np.asarray(pages, np.float32) * scale, np.asarray(wide, np.float32)
        assert (np.abs(rounded - wanted) <= np.abs(wanted) / 16 + scale * 2.0**-10).all() and (
            wanted != 0
        ).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"max_num_batched_tokens": 16}, {"tensor_parallel_size": 2}], ids=str
)
def test_a_request_gets_the_same_however_it_is_run(
    make_engine: MakeEngine, tmp_path: Path, how: dict[str, Any]
) -> None:
    path = checkpoint(tmp_path, named("k_scale", "v_scale"))
    alone, _ = served(
        make_engine, path, max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False
    )
    for found, expected in zip(served(make_engine, path, **how)[0], alone, strict=True):
        found.assert_like(expected)


@pytest.mark.slow
def test_layers_without_scales_compute_theirs(make_engine: MakeEngine, tmp_path: Path) -> None:
    report = Kept()
    _, engine = served(
        make_engine, checkpoint(tmp_path, named("k_scale", "v_scale", layers=1)), report=report
    )
    first, second = (np.asarray(pool, np.float32) for pool in by_layer(engine.runner.kv)[2])
    assert set(np.unique(first[:, :, 0])) == {0, STORED[0, 0]}
    assert len(np.unique(second[:, :, 0])) > 2
    assert (
        report.rows["KV scales"]
        == "the checkpoint's for 1 of 2 layers; for the others one for each token and head, "
        "computed when it is written"
    )


def test_pages_of_full_precision_have_nothing_to_do_with_them(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    report = Kept()
    engine = make_engine(
        model=checkpoint(tmp_path, named("k_scale", "v_scale")), load_format="auto", report=report
    )
    assert len(engine.runner.weights) == len(
        make_engine(model=str(LLAMA), load_format="auto").runner.weights
    )
    assert "KV scales" not in report.rows


def test_pages_are_what_the_checkpoint_wants_unless_somebody_asks_otherwise(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    path, plain = (
        checkpoint(
            tmp_path, named("k_proj.k_scale", "v_proj.v_scale"), quantization_config=MODELOPT
        ),
        str(LLAMA),
    )
    found = {}
    for asked, model in (("auto", path), ("fp8", path), ("float32", path), ("auto", plain)):
        report = Kept()
        engine = make_engine(model=model, load_format="auto", kv_cache_dtype=asked, report=report)
        found[asked, model] = (
            engine.resolved.kv_dtype,
            report.rows.get("KV scales"),
            len(engine.runner.weights),
        )
    assert (
        found["auto", path]
        == found["fp8", path]
        == ("float8_e4m3fn", "the checkpoint's", found["auto", plain][2] + 2)
    )
    assert (
        found["float32", path] == found["auto", plain] == ("float32", None, found["auto", plain][2])
    )
    with pytest.raises(
        ConfigError,
        match=r"--kv-cache-dtype bfloat16 is neither of 8 bits .* give float32, fp8 or auto, "
        "or --dtype bfloat16",
    ):
        make_engine(model=path, load_format="auto", kv_cache_dtype="bfloat16")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"0.self_attn.k_scale": 1.0},
            r"has model\.layers\.0\.self_attn\.k_scale, "
            "but not the other of .*k_scale and .*v_scale",
        ),
        (
            {"0.self_attn.k_scale": np.ones(3), "0.self_attn.v_scale": 1.0},
            r"k_scale is F32 \[3\]; numbers of .*, "
            "one for all of a layer's KV heads or one for each of the 2;",
        ),
        (
            {"0.self_attn.k_scale": np.ones((2, 8)), "0.self_attn.v_scale": 1.0},
            r"k_scale is F32 \[2, 8\]; numbers of",
        ),
        (
            {"0.self_attn.k_scale": [1, 0], "0.self_attn.v_scale": 1.0},
            r"k_scale is 0\.0; a scale lies between",
        ),
        (
            {"0.self_attn.k_scale": 0.0, "0.self_attn.v_scale": 1.0},
            r"k_scale is 0\.0; a scale lies between",
        ),
        (
            {"0.self_attn.k_scale": 1.0, "0.self_attn.v_scale": np.nan},
            r"v_scale is nan; a scale lies between",
        ),
        (
            {"0.self_attn.k_scale": 1.0, "0.self_attn.v_scale": np.inf},
            r"v_scale is inf; a scale lies between",
        ),
    ],
)
def test_scales_that_cannot_be_used_are_refused(
    make_engine: MakeEngine, tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    path = checkpoint(tmp_path, extra)
    with pytest.raises(ConfigError, match=message + r".*give the model's type as --kv-cache-dtype"):
        make_engine(model=path, load_format="auto", kv_cache_dtype="fp8")
    assert (
        make_engine(model=path, load_format="auto", kv_cache_dtype="float32").resolved.kv_dtype
        == "float32"
    )
