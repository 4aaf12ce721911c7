"""The program that writes weights in place, compiled for H200s on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.runtime.h200 import COMPILER, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
REPO = Path(__file__).parents[2]
SCRIPT = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, Mesh
from jaxllm.mesh import sharding
from jaxllm.weights import staging
from tests.engine.runtime.h200 import aliased, described

shards = int(sys.argv[1])
grid = np.array(described(shards), dtype=object).reshape(1, shards, 1)
mesh = Mesh(grid, ("data", "tensor", "expert"), axis_types=(AxisType.Auto,) * 3)
for shape, axes, dtype in (
    ((shards, 2, 18944 // shards, 3584), ("shard",), "bfloat16"),
    ((3584, 18944), ("embed", "mlp"), "bfloat16"),
    ((152064, 3584), (), "float32"),
    ((4096, 4096), ("vocab",), "float8_e4m3fn"),
):
    like = jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=sharding(mesh, axes))
    program = staging.compile_writer(like)
    assert aliased(program.as_text()) == {0}, (shape, "is copied")
    needed = program.memory_analysis().temp_size_in_bytes
    assert needed <= staging.BUFFER_BYTES // staging.CHUNKS, (shape, needed)
    assert not [word for word in ("all-", "collective") if word in program.as_text()], shape
"""


@pytest.mark.parametrize("shards", [1, 2])
def test_a_weight_is_written_in_place_by_each_device_alone(shards: int) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    path = os.pathsep.join([str(COMPILER), str(REPO)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(shards)],
        env=own | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
