"""The engine behind an `LLM`: arguments refused at start, defaults, metrics, profiles, a second
model in one process."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest

from jaxllm import LLM, ConfigError, SamplingParams
from jaxllm.cache.events import AllBlocksCleared, BlockStored, KVEventBatch
from jaxllm.library.driver import frozen_heap
from jaxllm.metrics import Counter, Gauge
from tests.engine.few_shapes import few_shapes

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> LLM:
    with few_shapes():
        return LLM(
            "demo", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64, enforce_eager=True
        )


@pytest.mark.slow
def test_a_listener_hears_which_pages_are_cached(llm: LLM) -> None:
    heard: list[KVEventBatch] = []
    llm.on_kv_events(heard.append)
    prompt = list(range(1, 41))
    llm.generate([prompt], GREEDY, use_tqdm=False)
    size = llm.engine.resolved.page_size
    tokens = [
        token
        for batch in heard
        for event in batch.events
        if isinstance(event, BlockStored)
        for token in event.token_ids
    ]
    assert tokens[: 40 // size * size] == prompt[: 40 // size * size]
    assert llm.reset_prefix_cache()
    llm.generate([[1]], GREEDY, use_tqdm=False)
    assert any(isinstance(event, AllBlocksCleared) for batch in heard for event in batch.events)


@pytest.mark.slow
def test_a_second_model_in_the_same_process_changes_nothing_for_the_first(
    llm: LLM, tmp_path: Path
) -> None:
    first = llm.generate("7 + 8 =", GREEDY, use_tqdm=False)[0].outputs[0].text
    demo = Path(llm.engine.resolved.model_dir)
    (tmp_path / "config.json").write_text((demo / "config.json").read_text())
    with few_shapes():
        other = LLM(
            str(tmp_path),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_seqs=1,
            enforce_eager=True,
        )
    (output,) = other.generate(
        [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].text == ""
    with pytest.raises(ConfigError, match="tokenizer"):
        other.generate("text", use_tqdm=False)
    assert llm.generate("7 + 8 =", GREEDY, use_tqdm=False)[0].outputs[0].text == first


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"no_such_argument": 1}, "no_such_argument"),
        ({"quantization": "awq"}, "quantization"),
        ({"data_parallel_size": 2}, "jaxllm serve --data-parallel-size"),
        ({"max_model_len": "12q"}, "12q"),
        ({"chat_template": "/no/such.jinja"}, "such.jinja"),
        ({"max_model_len": 10**6}, "max-model-len"),
        ({"num_gpu_blocks_override": 1}, "max_model_len"),
        ({"max_num_seqs": 0}, "max-num-seqs"),
        ({"max_num_seqs": 1.5}, "max-num-seqs"),
        ({"seed": -1}, "seed"),
        ({"seed": 10**20}, "seed"),
        ({"max_logprobs": -2}, "max-logprobs"),
        ({"gpu_memory_utilization": float("nan")}, "gpu-memory-utilization"),
        ({"gpu_memory_utilization": True}, "gpu-memory-utilization"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching must be True or False, got None"),
        ({"num_gpu_blocks_override": 10**11}, "num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 10**15}, "GiB is available"),
        ({"model": None}, "hub id"),
        ({"max_num_batched_tokens": 2}, "max-num-batched-tokens"),
        ({"block_size": 7}, "block-size"),
        ({"tensor_parallel_size": 999}, "999"),
        ({"dtype": "int3"}, "int3"),
        ({"load_format": "pickle"}, "load_format"),
    ],
)
def test_a_configuration_that_cannot_work_is_one_readable_line(arguments: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        LLM(**({"model": "demo"} | arguments))
    assert "\n" not in str(error.value)


def test_a_chat_template_that_is_not_jinja_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        LLM("demo", chat_template="{% if %}")


def test_defaults_that_cannot_be_honoured_are_said_once_and_left_out(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "repetition_penalty": 1.1, "top_p": 7}'
    )
    monkeypatch.setattr(
        llm.engine, "resolved", replace(llm.engine.resolved, model_dir=str(tmp_path))
    )
    monkeypatch.delitem(vars(llm), "_defaults", raising=False)
    assert [llm.get_default_sampling_params() for _ in range(2)] == [
        SamplingParams(temperature=0.6, repetition_penalty=1.1)
    ] * 2
    assert len(caplog.records) == 1
    monkeypatch.delitem(vars(llm), "_defaults")


def test_what_was_there_before_is_collected_again_after_a_call_even_one_that_fails() -> None:
    before = gc.get_freeze_count()

    def fail() -> None:
        with frozen_heap():
            assert gc.get_freeze_count() > before + 1000
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.get_freeze_count() == 0


def test_metrics_are_objects_with_a_name_and_a_value_as_vllms(llm: LLM) -> None:
    def values() -> dict[str, float]:
        metrics = llm.get_metrics()
        assert all(isinstance(metric, (Counter, Gauge)) for metric in metrics)
        assert all(metric.labels == {"model_name": "demo", "engine": "0"} for metric in metrics)
        return {metric.name: metric.value for metric in metrics}

    llm.generate("1 + 1 =", GREEDY, use_tqdm=False)  # compiles what an eager engine has not
    before = values()
    (output,) = llm.generate("1 + 1 =", GREEDY, use_tqdm=False)
    after = values()
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grown.pop("vllm:prompt_tokens") == len(output.prompt_token_ids)
    assert grown.pop("vllm:generation_tokens") == len(output.outputs[0].token_ids)
    assert grown.keys() <= {
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:kv_cache_usage_perc",
        "jaxllm:engine_steps",
    }
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


@pytest.mark.slow
def test_a_profile_of_what_runs_between_start_and_stop_is_written(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profiler_dir of LLM"):
        llm.start_profile()
    traced = LLM(
        "demo",
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        enforce_eager=True,
        profiler_dir=str(tmp_path),
    )
    traced.start_profile()
    traced.generate("1 + 1 =", replace(GREEDY, max_tokens=2), use_tqdm=False)
    traced.stop_profile()
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_the_prefix_cache_can_be_emptied_between_calls(llm: LLM) -> None:
    prompt = "1 + 1 = 2. " * 6
    cached = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert cached[1] > 0
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
