"""An engine that sleeps holds no device memory, and wakes as it was."""

from __future__ import annotations

import gc
import importlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, ConfigError, SamplingParams
from jaxllm.locate import locate
from jaxllm.messages import RequestError
from jaxllm.weights import fill
from tests.engine.few_shapes import few_shapes

load = importlib.import_module("jaxllm.weights.load")  # `weights.load` is the function
GREEDY = SamplingParams(temperature=0, max_tokens=8)
QUESTIONS = ["7 + 8 =", "The capital of"]


@pytest.fixture(scope="module")
def others() -> int:
    """Bytes that other tests left in device memory."""
    return device_bytes()


@pytest.fixture(scope="module")
def llm(others: int) -> LLM:
    with few_shapes():
        return LLM(
            "demo", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64, enforce_eager=True
        )


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model's matrices are large ones."""
    monkeypatch.setattr(fill, "SMALL_BYTES", 2**14)


def answers(llm: LLM) -> list[list[int]]:
    found = llm.generate(QUESTIONS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in found]


def device_bytes() -> int:
    """Bytes of the arrays in device memory that something refers to."""
    gc.collect()
    return sum(
        array.nbytes
        for array in jax.live_arrays()
        if not array.is_deleted() and array.sharding.memory_kind != "pinned_host"
    )


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_wakes_answers_as_before_and_compiles_nothing(
    llm: LLM, others: int, level: int
) -> None:
    before, awake = answers(llm), device_bytes() - others
    compiles = llm.engine.stats().compiles_after_warmup
    llm.sleep(level)
    assert llm.engine.stats().sleep_level == level
    assert device_bytes() - others < awake / 20
    with pytest.raises(RequestError, match="sleeps") as refused:
        answers(llm)
    assert refused.value.code == "sleeping"
    llm.sleep(level)  # nothing happens
    llm.wake_up()
    assert device_bytes() - others > 0.9 * awake
    assert answers(llm) == before
    assert llm.engine.stats().sleep_level == 0
    assert llm.engine.stats().compiles_after_warmup == compiles
    llm.engine.scheduler.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wishes",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"quantization": "fp8"},
        {"tensor_parallel_size": 2, "quantization": "int4"},
    ],
    ids=str,
)
def test_weights_over_devices_and_in_few_bits_sleep_and_are_replaced_too(
    wishes: dict[str, Any], tmp_path: Path, buffered: None
) -> None:
    with few_shapes():
        llm = LLM("demo", max_model_len=512, max_num_seqs=4, enforce_eager=True, **wishes)
    before = answers(llm)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert answers(llm) == before
    pages = jax.tree.leaves(llm.engine.sleeper.runner.kv)
    llm.update_weights(str(changed(tmp_path)))
    room = "quantization" in wishes
    assert {page.is_deleted() for page in pages} == {room}, "rounding needs the pages' room"
    assert answers(llm) != before
    llm.update_weights("demo")
    assert answers(llm) == before
    llm.engine.scheduler.check()


def test_only_idle_engines_sleep_and_only_at_known_levels(llm: LLM) -> None:
    with pytest.raises(ValueError, match="level must be 1"):
        llm.sleep(3)
    before = answers(llm)
    llm.wake_up()  # nothing happens
    assert answers(llm) == before


def changed(tmp_path: Path, **config: int) -> Path:
    """The demo model with other weights and, where asked for, sizes."""
    for file in locate("demo", None, None).iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (weights,) = locate("demo", None, None).glob("*.safetensors")
    tensors = load_file(weights)
    rng = np.random.default_rng(0)
    noisy = {
        name: (x.astype(np.float32) + rng.normal(0, 0.2, x.shape)).astype(x.dtype)
        for name, x in tensors.items()
    }
    save_file(noisy, tmp_path / weights.name, {"format": "pt"})
    options = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(options | config))
    return tmp_path


def test_weights_of_another_checkpoint_take_the_place_of_those_of_now(
    llm: LLM, tmp_path: Path
) -> None:
    before, compiles = answers(llm), llm.engine.stats().compiles_after_warmup
    llm.update_weights(str(changed(tmp_path)))
    other = answers(llm)
    assert other != before
    assert llm.engine.stats().compiles_after_warmup == compiles
    llm.update_weights("demo")
    assert answers(llm) == before


def test_a_checkpoint_that_does_not_fit_leaves_the_weights_of_before(
    llm: LLM, tmp_path: Path
) -> None:
    before = answers(llm)
    with pytest.raises(ConfigError):
        llm.update_weights(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError):
        llm.update_weights(str(tmp_path))
    assert answers(llm) == before


def stored() -> dict[str, np.ndarray]:
    """The demo model's tensors."""
    (file,) = locate("demo", None, None).glob("*.safetensors")
    return load_file(file)


def test_weights_are_overwritten_in_place_and_the_engine_answers_as_a_new_one(
    buffered: None, tmp_path: Path
) -> None:
    other = str(changed(tmp_path))
    wishes: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True}
    with few_shapes():
        llm, expected = LLM("demo", **wishes), answers(LLM(other, **wishes))
    assert answers(llm) != expected
    runner = llm.engine.sleeper.runner
    large = [at for at, array in enumerate(runner.weights) if not fill.is_small(array)]
    places = [runner.weights[at].unsafe_buffer_pointer() for at in large]
    held, pages = device_bytes(), jax.tree.leaves(runner.kv)
    llm.update_weights(other)
    assert all(now is before for now, before in zip(jax.tree.leaves(runner.kv), pages, strict=True))
    assert answers(llm) == expected
    assert large and [runner.weights[at].unsafe_buffer_pointer() for at in large] == places
    assert device_bytes() == held
    llm.update_weights((name, jax.numpy.asarray(array)) for name, array in stored().items())
    before = answers(llm)
    assert before != expected
    llm.update_weights(stored())
    assert answers(llm) == before
    for level in (1, 2):
        llm.sleep(level)
        llm.update_weights(other)
        assert answers(llm) == expected
        llm.update_weights("demo")
        assert answers(llm) == before
    llm.sleep(1)
    llm.wake_up()
    llm.update_weights(other)
    assert answers(llm) == expected


def test_pages_that_weights_of_nan_have_left_harm_nobody_under_the_next_ones(
    llm: LLM, buffered: None
) -> None:
    before = answers(llm)
    llm.update_weights({name: np.full_like(array, np.nan) for name, array in stored().items()})
    assert answers(llm) == [[] for _ in QUESTIONS], "no token can be drawn"
    llm.update_weights(stored())
    pages = jax.tree.leaves(llm.engine.sleeper.runner.kv)
    assert any(np.isnan(np.asarray(page, np.float32)).any() for page in pages)
    assert answers(llm) == before


def test_arrays_that_do_not_fit_leave_the_weights_of_before(llm: LLM) -> None:
    before, tensors = answers(llm), stored()
    name = next(iter(tensors))
    for wrong in (
        tensors | {name: tensors[name][1:]},
        tensors | {name: tensors[name].astype(np.int8)},
        tensors | {name: tensors[name].tolist()},
        tensors | {"model.extra": np.zeros(3, np.float32)},
        {other: array for other, array in tensors.items() if other != name},
    ):
        with pytest.raises(ConfigError, match="the arrays given do not fit the model: "):
            llm.update_weights(wrong)
    assert answers(llm) == before
    assert llm.engine.stats().sleep_level == 0


def test_a_checkpoint_that_ends_while_it_is_read_leaves_the_engine_asleep(
    llm: LLM, others: int, buffered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, awake, directory = answers(llm), device_bytes() - others, changed(tmp_path)
    (file,) = directory.glob("*.safetensors")
    real = load.fill

    def shorten(*given: Any) -> Any:
        os.truncate(file, file.stat().st_size // 2)
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(load, "fill", shorten)
        with pytest.raises(ConfigError, match="the checkpoint cannot be read"):
            llm.update_weights(str(directory))
    assert llm.engine.stats().sleep_level == 2
    assert device_bytes() - others < awake / 20
    with pytest.raises(RequestError, match="sleeps"):
        answers(llm)
    llm.wake_up()
    assert answers(llm) == before


def test_weights_for_which_pages_leave_no_room_are_read_beside_nothing(
    llm: LLM, buffered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, pages = answers(llm), jax.tree.leaves(llm.engine.sleeper.runner.kv)
    real, seen = load.fill, list[bool]()

    def fill_without_room(*given: Any) -> Any:
        seen.append(all(page.is_deleted() for page in pages))
        if not seen[-1]:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(load, "fill", fill_without_room)
        llm.update_weights(stored())
    assert seen == [False, True]
    assert llm.engine.stats().sleep_level == 0
    assert answers(llm) == before
