"""Bringing an engine up: what the device's client is told before it exists."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.runtime.compilation.executables import Executables
from jaxllm.engine.startup import device_client, started
from jaxllm.engine.startup.lattice import make_programs
from jaxllm.engine.startup.measure import much_is_missing
from jaxllm.engine.startup.program_cache import drop_empty, use_compilation_cache
from jaxllm.engine.startup.report import Report
from jaxllm.engine.startup.started import read_tokenizer
from jaxllm.engine.startup.wishes import read_wishes
from jaxllm.grammar.matcher import Matchers
from tests.engine.startup.decisions import decide
from tests.goldens.golden import load_golden


def test_a_cache_that_others_may_write_to_is_refused_where_it_was_asked_for(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        use_compilation_cache(str(tmp_path))


def test_who_has_no_home_keeps_nothing_and_an_unknown_one_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(Path, "expanduser", homeless)
    try:
        use_compilation_cache(None)
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    with pytest.raises(
        ConfigError, match="~nobody/cache cannot be used: Could not determine home directory"
    ):
        use_compilation_cache("~nobody/cache")


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """A directory in which JAX keeps all programs that it compiles."""
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for values in (wanted, before):
        compilation_cache.reset_cache()
        for name, value in values.items():
            jax.config.update(name, value)
        if values is wanted:
            yield tmp_path


def test_programs_of_which_a_full_disk_took_nothing_are_kept_the_next_time(kept: Path) -> None:
    """JAX's cache leaves an entry that is there as it is."""

    def programs() -> dict[str, bytes]:
        for factor in (3, 5):
            x = jax.ShapeDtypeStruct((factor,), jnp.float32)
            jax.jit(lambda x: 2 * x).lower(x).compile()
        return {entry.name: entry.read_bytes() for entry in kept.glob("*-cache")}

    before = programs()
    lost, other = sorted(before)
    (kept / lost).write_bytes(b"")
    drop_empty(kept)
    assert {entry.name for entry in kept.glob("*-cache")} == {other}
    after = programs()
    assert after.keys() == before.keys()
    assert after[lost] and after[other] == before[other]


def test_a_server_reads_the_vocabulary_for_grammars_at_start_and_the_library_with_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Matchers] = []
    monkeypatch.setattr(Matchers, "start_vocabulary", lambda self: begun.append(self))
    for stall, reads in ((None, 0), (50.0, 1)):
        begun.clear()
        tokenizer, matchers = read_tokenizer(read_wishes(EngineConfig(max_stall_ms=stall)))
        assert tokenizer is not None and matchers is not None
        assert len(begun) == reads
        matchers.end_threads()
    wishes = read_wishes(EngineConfig(skip_tokenizer_init=True))
    assert read_tokenizer(wishes) == (None, None)


def test_a_config_that_cannot_be_is_the_first_to_be_told_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": "many"}')
    with pytest.raises(ConfigError, match=r"config\.json"):
        started.start(EngineConfig(model=str(tmp_path)), Report())


@pytest.mark.usefixtures("cuda_installed")
def test_workers_begin_early_where_no_start_has_kept_anything(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    config = EngineConfig(model="demo")
    assert started._early_workers(config) == 10
    assert started._early_workers(replace(config, pipeline_parallel_size=2)) == 10
    hosts = replace(config, nnodes=2, tensor_parallel_size=2, group_key_file="key")
    assert started._early_workers(hosts) == 0
    assert started._early_workers(EngineConfig(model="demo", enforce_eager=True)) == 0
    (cache / "programs").mkdir()
    assert started._early_workers(config) == 10
    (cache / "programs" / "set").mkdir()
    assert started._early_workers(config) == 0
    for elsewhere in ("gs://bucket/cache", None):
        jax.config.update("jax_compilation_cache_dir", elsewhere)
        assert started._early_workers(config) == 0


@pytest.mark.usefixtures("cuda_installed")
def test_a_cache_that_is_another_users_costs_time_only(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "programs").mkdir()

    def refused(folder: Path) -> Iterator[Path]:
        raise PermissionError(folder)

    monkeypatch.setattr(Path, "iterdir", refused)
    assert started._early_workers(EngineConfig(model="demo")) == 0


def test_workers_are_for_a_start_that_has_many_programs_to_make(tiny_dir: str, cache: Path) -> None:
    config = EngineConfig(
        model=tiny_dir,
        max_model_len=32,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=8,
    )
    programs = make_programs(decide(config, tiny_dir).lattice)
    exports = programs.executables.exports
    assert exports is not None
    kept = [
        exports.folder / f"{programs.name(key)}.stablehlo"
        for key in programs.lattice
        if programs.is_kept(key)
    ]
    few = -(-len(kept) // 4) - 1  # below a quarter
    assert few
    for path in kept[few:]:
        assert much_is_missing(programs)
        path.touch()
    assert not much_is_missing(programs)
    exports.keep_figures({"workspace": 1})
    other = replace(config, num_gpu_blocks_override=9)
    assert much_is_missing(make_programs(decide(other, tiny_dir).lattice)), "another pool"
    assert not much_is_missing(make_programs(decide(config, tiny_dir).lattice, Executables())), (
        "nothing is ever kept"
    )


def test_without_the_cuda_plugin_no_worker_begins_early(
    cuda_installed: None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_client, "entry_points", lambda group: [])
    assert started._early_workers(EngineConfig(model="demo")) == 0


def test_sizes_that_the_files_do_not_have_are_refused_before_the_tokenizer_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = load_golden("llama-gqa").directory
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", tmp_path)
    monkeypatch.setattr(started, "read_tokenizer", lambda *given: pytest.fail("it was read"))
    with pytest.raises(ConfigError, match="num_hidden_layers is 4096, the files hold 2 layers"):
        started.start(EngineConfig(model=str(tmp_path)), Report())


@pytest.mark.usefixtures("cuda_installed")
def test_more_ends_than_a_slot_holds_are_refused_before_the_tokenizer_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(started, "read_tokenizer", lambda *given: pytest.fail("it was read"))
    source = str(load_golden("llama-gqa").directory)
    config = EngineConfig(model=source, hf_overrides={"eos_token_id": list(range(17))})
    with pytest.raises(ConfigError, match="end-of-sequence ids; at most 16 are supported"):
        started.start(config, Report())
