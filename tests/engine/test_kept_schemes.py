"""Weights of every scheme are kept by `jaxllm convert --as-served`, and a start that reads them
alone gives the tokens of one that reads the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import cli, models, weights
from jaxllm.engine.engine import Engine
from jaxllm.locate import locate
from jaxllm.nn.weight.schemes import SCHEMES
from jaxllm.quantisation import ONLINE, methods
from jaxllm.sampling.options import SamplingParams
from jaxllm.weights import reader
from tests.engine.conftest import run
from tests.gguf.converted import converted
from tests.gguf.writer import IQ4_NL, Stored, plain, random_blocks
from tests.goldens.golden import HERE
from tests.weights import test_bitsandbytes, test_grouped, test_held_fp4
from tests.weights.packed import (
    FBGEMM,
    FP8,
    MXFP4,
    Pair,
    fp8_pair,
    fp8_row_pair,
    mxfp4_pair,
    write,
)

LLAMA = "llama-gqa"
PROMPTS = [[3, 5, 7, 9, 11], [1, 2, 3], [40, 2, 40, 2, 8, 6, 4]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def blocks_of_iq4(name: str, tensor: np.ndarray) -> Stored:
    """A tensor of a GGUF file; matrices of layers are random blocks of 4 bits."""
    matrix = tensor.ndim == 2 and name.startswith("blk.") and tensor.shape[1] % 32 == 0
    return random_blocks(IQ4_NL, tensor.shape) if matrix else plain(tensor)


def gguf(path: Path) -> Path:
    file = converted(LLAMA, "llama", path / "model.gguf", blocks_of_iq4)
    return locate(str(file), download_dir=str(path / "made"))


def packed(make: Callable[[], tuple[Any, ...]]) -> Callable[[Path], Path]:
    """What writes a checkpoint of a pair and its `quantization_config`."""

    def written(path: Path) -> Path:
        pair, settings, *_ = make()
        assert isinstance(pair, Pair)
        return write(path / "model", pair.config | {"quantization_config": settings}, pair.packed)

    return written


# A checkpoint of each method, in all numbers that devices can hold
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "auto-round": packed(lambda: test_grouped.pair(LLAMA, "auto-round")),
    "awq": packed(lambda: test_grouped.pair(LLAMA, "awq")),
    "bitsandbytes": packed(lambda: test_bitsandbytes.pair(LLAMA, "nf4")),
    "compressed-tensors": packed(lambda: test_grouped.pair(LLAMA, "pack-quantized")),
    "fbgemm-fp8": packed(lambda: (fp8_row_pair(LLAMA), FBGEMM)),
    "fp8": packed(lambda: (fp8_pair(LLAMA), FP8)),
    "gguf": gguf,
    "gptq": packed(lambda: test_grouped.pair(LLAMA, "gptq of 8 bits, symmetric")),
    "modelopt": packed(lambda: test_held_fp4.pair(LLAMA, "modelopt")),
    "mxfp4": packed(lambda: (mxfp4_pair(), MXFP4)),
}

QUICK = {"gptq", "mxfp4", "int8"}


def checkpoint(method: str, path: Path) -> Path:
    """A model directory whose weights are packed by this method."""
    assert method in CHECKPOINTS, "a new method needs a checkpoint here"
    return CHECKPOINTS[method](path)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """A function after which no weight of a checkpoint can be read, nor its scales checked. How it
    is packed may be."""

    def begin(model: Path) -> None:
        def refuse(method: str) -> None:
            real = getattr(reader.Checkpoint, method)

            def called(self: reader.Checkpoint, *given: Any) -> Any:
                assert self.directory != model, "the checkpoint was read"
                return real(self, *given)

            monkeypatch.setattr(reader.Checkpoint, method, called)

        refuse("view")
        refuse("check_values")

    return begin


def each() -> Iterator[Any]:
    """Every method and every wish; those that are not quick are slow tests."""
    for given in (*((name, None) for name in methods()), *((None, wish) for wish in ONLINE)):
        slow = not QUICK.intersection(given)
        yield pytest.param(*given, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("method", "wish"), [*each()])
def test_a_start_from_kept_weights_alone_gives_the_tokens_of_one_from_the_checkpoint(
    make_engine: Callable[..., Engine],
    tmp_path: Path,
    unread: Callable[[Path], None],
    method: str | None,
    wish: str | None,
) -> None:
    model = HERE / LLAMA if method is None else checkpoint(method, tmp_path)
    wishes = {"model": str(model), "load_format": "auto", "quantization": wish}
    expected = run(make_engine(**wishes), PROMPTS, GREEDY)
    cache = tmp_path / "cache"
    options = ["--dtype", "float32", *(["--quantization", wish] if wish else [])]
    assert cli.main(["convert", str(model), str(cache), "--as-served", *options]) == 0
    (entry,) = cache.glob("[!.]*")
    unread(model)
    with pytest.raises(AssertionError, match="was read"):
        make_engine(**wishes)
    assert run(make_engine(**wishes, weight_cache_dir=str(cache)), PROMPTS, GREEDY) == expected
    assert [*cache.glob("[!.]*")] == [entry]


def test_these_checkpoints_are_held_in_all_numbers_that_devices_know(tmp_path: Path) -> None:
    found = set()
    for method in methods():
        (path := tmp_path / method).mkdir()
        model = checkpoint(method, path)
        formats = weights.weight_formats(model, models.read_spec(model), None)
        found |= {kind.numbers for kind in formats.values()}
    assert found == set(SCHEMES)
