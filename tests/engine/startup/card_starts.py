"""A start's decisions for a GPU that is not here: the same `fit`, whose programs XLA compiles for
the card's description. A process is of one card, see `tests.engine.runtime.h200`."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.extend.backend import get_compile_options
from jaxlib.xla_client import DeviceList

from benchmarks.shapes import ALWAYS, SHAPES
from jaxllm import weights
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.runtime.compilation.executables import Executables, Recipe
from jaxllm.engine.runtime.lattice import Programs, needed_bytes
from jaxllm.engine.startup import budget, lattice, measure, model_plan
from jaxllm.engine.startup.lattice import make_programs, plan_lattice
from jaxllm.engine.startup.measure import measured_need
from jaxllm.engine.startup.memory_plan import MemoryPlan, first_plan, fit
from jaxllm.engine.startup.model_plan import ModelPlan, plan_model
from jaxllm.engine.startup.wishes import Wishes
from jaxllm.mesh import make_mesh
from jaxllm.models import Wish, read_spec
from jaxllm.units import GIB
from tests.engine.runtime.cards import CARDS, MEMORIES
from tests.engine.runtime.h200 import described

ALL = CARDS | MEMORIES
SHARE = 0.9  # of a card's memory, which the driver leaves and an engine takes by default


@dataclass(frozen=True)
class Compiled:
    """What `needed_bytes` asks of a program."""

    memory: Any

    def memory_analysis(self) -> Any:
        """XLA's account."""
        return self.memory


class ForCard(Executables):
    """Compiles for the described card what was lowered over a CPU, which knows pinned memory."""

    card: Any = None

    def __init__(self, options: Any, exports: object = None, platform: str = "gpu"):
        super().__init__(options, None, "gpu")

    def compile(self, name: str, rows: int, recipe: Recipe, keep: bool) -> Any:
        """As of `Executables`."""
        jitted = jax.jit(
            recipe.function,
            donate_argnums=recipe.donated,
            out_shardings=recipe.out,
            keep_unused=True,
        )
        lowered = jitted.trace(*recipe.arguments).lower(lowering_platforms=("cuda",))
        options = self.options(name.partition("-")[0], rows) | {"xla_gpu_autotune_level": 0}
        compiled = self.card.client.compile(
            lowered.compiler_ir("stablehlo"),
            DeviceList((self.card,)),
            get_compile_options(1, 1, device_assignment=[[0]], env_options_overrides=options),
        )
        return Compiled(compiled.get_compiled_memory_stats())


class CardSteps:
    """A `Measure` of the largest programs."""

    def __init__(self, model: ModelPlan):
        self._model = model
        self.steps: list[int] = []

    def expected(self, model: ModelPlan, plan: MemoryPlan) -> int:
        """As of `Measure`."""
        step = measured_need(model, plan, make_programs(plan_lattice(model, plan)))
        self.steps.append(step)
        return step

    def compiled(self, plan: MemoryPlan) -> int:
        """As of `Measure`, of the programs that need most."""
        programs: Programs = make_programs(plan_lattice(self._model, plan))
        keys = [programs.largest, *programs.largest_others]
        programs.compile(keys)
        self.steps.append(max(needed_bytes(programs.get(key)) for key in keys))
        return self.steps[-1]

    def keep(self, step: int) -> None:
        """As of `Measure`."""


def plan_for(card: str, config: EngineConfig) -> ModelPlan:
    """What a start decides on a card, of which programs are lowered over a CPU."""
    directory = Path(config.model)
    spec = read_spec(directory, Wish.of(config))
    meshes = [make_mesh(1, described(1, card))]
    return on_a_cpu(plan_model(Wishes(config, weights.ModelFiles(directory), spec), meshes))


def on_a_cpu(plan: ModelPlan) -> ModelPlan:
    """The same decisions, with arrays on this machine's CPU."""
    mesh = make_mesh(1, jax.devices("cpu"))
    outline = weights.outline(plan.spec, mesh, plan.dtype, plan.stage)
    return replace(plan, meshes=(mesh,), mesh=mesh, outline=outline)


def started(card: str, model: str, layers: int | None = None, **wishes: Any) -> dict[str, Any]:
    """What a start of a benchmark's shape decides on this card, or the error that it ends with. The
    model has as many `layers` as it has, or these."""

    def with_steps(plan: ModelPlan, tokens: int, seqs: int) -> ModelPlan:
        smaller = replace(plan.config, max_num_batched_tokens=tokens, max_num_seqs=seqs)
        return plan_for(card, smaller)

    ForCard.card = described(1, card)[0]
    usable = int(ALL[card].memory * SHARE * GIB)
    shape = ALWAYS | SHAPES[model] | ({"num_hidden_layers": layers} if layers else {})
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(shape))
        patch.setattr(lattice, "Executables", ForCard)
        patch.setattr(measure, "Executables", ForCard)
        patch.setattr(budget, "usable_bytes", lambda *_: usable)
        patch.setattr(ModelPlan, "with_steps", with_steps)
        patch.setattr(model_plan, "target_of", lambda _: ALL[card].offer)
        try:
            plan = plan_for(card, EngineConfig(model=directory, load_format="dummy", **wishes))
            steps = CardSteps(plan)
            memory = fit(plan, first_plan(plan), steps)
        except ConfigError as error:
            return {"error": str(error)}
    return {
        "error": None,
        "backend": plan.backend.name,
        "weights": plan.budget.weights,
        "steps": steps.steps,
        "left": memory.step_bytes,
        "pages": memory.num_pages,
        "length": memory.max_model_len,
        "pages_per_request": memory.need.pages_per_request,
    }


def main() -> None:
    """Answer each line of standard input, a JSON object of `started`'s arguments."""
    for line in sys.stdin:
        print(json.dumps(started(sys.argv[1], **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
