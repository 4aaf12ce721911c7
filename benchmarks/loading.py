"""Loading a checkpoint: random safetensors of a shape are written to disk and loaded onto the
devices; GB/s and host memory.

    python -m benchmarks.loading --model shape:qwen2.5-7b        15 GB, in shards of 4 GB, below
      --directory

"disk" is after the file system was told to forget the files, as far as it does that; "page cache"
right after it; "in place" is a third load, over the weights of the second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.record import finish, parser
from benchmarks.shapes import PREFIX, write
from jaxllm import weights
from jaxllm.locate import locate
from jaxllm.mesh import make_mesh
from jaxllm.models import read_spec
from jaxllm.models.config.build import outline, rules

SHARD_BYTES = 4 * 10**9
BYTES = 2  # of a bfloat16
SAMPLE_SECONDS = 0.005


def tensors(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint that fits the config.json of a directory."""
    spec = read_spec(directory)
    table = rules(spec, outline(spec, 1, "bfloat16"))
    return {piece.name: piece.source for rule in table for piece in rule.pieces}


def shards(shapes: dict[str, tuple[int, ...]], limit: int) -> list[dict[str, tuple[int, ...]]]:
    """The tensors in files of at most `limit` bytes, unless one alone is larger."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        count = int(np.prod(shape)) * BYTES
        if files[-1] and size + count > limit:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += count
    return files


def write_checkpoint(directory: Path, limit: int, seed: int | np.random.Generator) -> int:
    """Write model-0000N-of-0000M.safetensors and their index into `directory`; returns the bytes of
    all tensors."""
    files, rng = shards(tensors(directory), limit), np.random.default_rng(seed)
    index, total = {}, 0
    for number, shapes in enumerate(files, 1):
        path = directory / f"model-{number:05}-of-{len(files):05}.safetensors"
        total += write_shard(path, shapes, rng)
        index |= dict.fromkeys(shapes, path.name)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return total


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> int:
    """One file of random bfloat16 values of either sign and size around 0.01, one tensor at a time;
    returns the bytes of its tensors."""
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + int(np.prod(shape)) * BYTES
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            bits = np.frombuffer(rng.bytes(int(np.prod(shape)) * BYTES), np.uint16)
            # Sign and mantissa are random, the exponent is -7
            file.write(((bits & 0x807F) | 0x3C00).tobytes())
        file.flush()
        os.fsync(file.fileno())
    return at


def forget(directory: Path) -> None:
    """Ask the system to drop the files from its page cache, where it can."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def own_bytes() -> int:
    """Memory of this process that is not a mapped file, in bytes; 0 where /proc does not say."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(
            int(line.split()[1]) * 1024
            for line in lines
            if line.startswith(("RssAnon", "RssShmem"))
        )
    return 0


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """Samples `own_bytes` meanwhile; the list it yields then holds how far it rose."""
    before, found, over = own_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            found[0] = max(found[0], own_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def load(directory: Path, before: Sequence[jax.Array] = ()) -> tuple[float, list[jax.Array]]:
    """Seconds of one load onto the devices, into weights of `before` if there are any; and the
    weights."""
    spec, mesh = read_spec(directory), make_mesh(1)
    # The first copy sets up the device's side
    jax.block_until_ready(jax.device_put(np.zeros(1 << 20), mesh.devices.flat[0]))
    start = time.perf_counter()
    _, state = weights.load(directory, weights.outline(spec, mesh, "bfloat16"), before=before)
    leaves = jax.block_until_ready(jax.tree.leaves(state))
    return time.perf_counter() - start, leaves


def measure(directory: Path, total: int) -> dict[str, Any]:
    """Loads from disk, then from the page cache, then in place. On CPU the devices' own memory is
    on the host too and counts."""
    forget(directory)
    with peak() as extra:
        disk, leaves = load(directory)
    for array in leaves:
        array.delete()
    cached, leaves = load(directory)
    in_place, _ = load(directory, leaves)
    seconds = {"disk": disk, "page_cache": cached, "in_place": in_place}
    return {
        "gigabytes": round(total / 1e9, 6),
        "shards": len(list(directory.glob("*.safetensors"))),
        **{f"{name}_s": round(each, 3) for name, each in seconds.items()},
        **{f"{name}_gb_per_s": round(total / each / 1e9, 2) for name, each in seconds.items()},
        "extra_host_gb": round(extra[0] / 1e9, 3),
    }


def main() -> None:
    """Write, load, report, and remove what was written."""
    args = parser(__doc__)
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.set_defaults(model="shape:tiny")
    args.add_argument(
        "--directory",
        type=Path,
        help="where to write the checkpoint; a temporary directory by default",
    )
    args.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    a = args.parse_args()
    with tempfile.TemporaryDirectory(dir=a.directory) as folder:
        if a.model.startswith(PREFIX):
            directory = write(a.model.removeprefix(PREFIX), Path(folder))
        else:
            directory = Path(folder)
            shutil.copy(locate(a.model, None, None) / "config.json", directory)
        start = time.perf_counter()
        total = write_checkpoint(directory, a.shard_bytes, a.seed)
        figures = {"write_s": round(time.perf_counter() - start, 1)} | measure(directory, total)
    finish("loading", a, figures)


if __name__ == "__main__":
    main()
