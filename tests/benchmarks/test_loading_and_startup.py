"""Written checkpoints load with the values that were meant; a start runs in its own process."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from benchmarks import loading, report, shapes, startup
from jaxllm.weights import ModelFiles, reader


def test_a_written_checkpoint_has_every_tensor_in_files_below_the_limit(tmp_path):
    directory = shapes.write("tiny", tmp_path)
    total = loading.write_checkpoint(directory, 100_000, seed=1)
    checkpoint = reader.Checkpoint(ModelFiles(directory))
    expected = loading.tensors(directory)
    assert not checkpoint.problems
    assert {name: entry.shape for name, entry in checkpoint.entries.items()} == expected
    assert total == sum(int(np.prod(shape)) * 2 for shape in expected.values())
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2
    # The embeddings alone are larger
    assert sum(path.stat().st_size > 110_000 for path in files) == 1


def test_written_values_are_random_small_and_of_either_sign(tmp_path):
    directory = shapes.write("tiny", tmp_path)
    loading.write_checkpoint(directory, 10**9, seed=1)
    values = (
        reader.Checkpoint(ModelFiles(directory))
        .view("model.embed_tokens.weight")
        .astype(np.float32)
    )
    assert np.abs(values).min() >= 2**-7 and np.abs(values).max() < 2**-6
    assert abs(float((values > 0).mean()) - 0.5) < 0.01
    assert len(np.unique(values)) == 256  # every mantissa, either sign


def test_a_load_is_measured_from_disk_and_from_the_page_cache(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "loading",
            "--output-json",
            str(out),
            "--directory",
            str(tmp_path),
            "--shard-bytes",
            "200000",
        ],
    )
    loading.main()
    record = json.loads(out.read_text())
    assert record["figures"]["disk_gb_per_s"] >= 0 < record["figures"]["page_cache_s"]
    assert record["figures"]["shards"] == 2
    assert list(tmp_path.iterdir()) == [out]  # the checkpoint is gone
    row = report.table("loading", [record]).splitlines()[-1]
    assert row.startswith("| shape:tiny") and "–" not in row


def test_the_peak_sees_memory_that_is_gone_again():
    if not loading.own_bytes():
        pytest.skip("this system does not say how much memory a process has")
    with loading.peak() as extra:
        blocks = [np.ones(50_000_000, np.uint8)]
        # What others give back meanwhile, or had given back before, does not count as gained
        while extra[0] < 45_000_000:
            if len(blocks) < 200:
                blocks.append(np.ones(5_000_000, np.uint8))
        del blocks
    assert extra[0] >= 45_000_000


@pytest.mark.slow
def test_a_cold_start_and_a_warm_one_are_told_by_phases(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    more = ["--max-model-len", "64", "--max-num-seqs", "1", "--options", '{"enforce_eager": true}']
    monkeypatch.setattr(
        sys, "argv", ["startup", "--model", "shape:tiny", *more, "--output-json", str(out)]
    )
    startup.main()
    record = json.loads(out.read_text())
    figures = record["figures"]
    for name in ("cold", "warm"):
        phases = figures[f"{name}_phases"]
        assert {"Interpreter and imports", "Loading weights", "First token"} <= set(phases)
        assert figures[f"{name}_s"] >= max(phases.values())
    assert figures["cache_mb"] > 0
    assert report.table("startup", [record]).splitlines()[-1].startswith("| shape:tiny")


@pytest.mark.slow
def test_a_server_is_timed_until_it_is_ready(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    options = ["--model", "demo", "--server", "--repeat", "1", "--output-json", str(out)]
    monkeypatch.setattr(sys, "argv", ["startup", *options])
    startup.main()
    record = json.loads(out.read_text())
    figures = record["figures"]
    assert figures["cold_seconds_runs"] == [figures["cold_seconds"]]
    assert figures["cold_processor"] > figures["warm_processor"] > 0
    assert report.table("server-startup", [record]).splitlines()[-1].startswith("| demo")


@pytest.mark.slow
def test_a_server_that_is_never_ready_gives_its_last_words(tmp_path):
    with pytest.raises(SystemExit, match="no model at /no/such/model"):
        startup.start_server("/no/such/model", tmp_path)


@pytest.mark.slow
def test_a_process_that_fails_gives_its_last_words(tmp_path):
    with pytest.raises(SystemExit, match="no model at /no/such/model"):
        startup.start({"model": "/no/such/model"}, tmp_path)
