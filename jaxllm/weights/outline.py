"""A model before its weights are read: modules, shapes, and the tensors that will fill them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.mesh import WHOLE, Stage, layer_devices, sharding
from jaxllm.models import ModelSpec
from jaxllm.models.config import build
from jaxllm.nn.rules import Rule
from jaxllm.weights.rounding import filled_by


@dataclass(frozen=True)
class Outline:
    """A model, or one stage of it, that holds no arrays yet. Enough to compile its programs, and to
    say which tensors its parameters are made of.

    To make one of 28 layers takes as long as copying 2 GB, so a start makes it once and hands it
    on.

    Attributes:
        spec: of the model.
        mesh: its devices.
        dtype: of plain weights.
        stage: whose parameters it has.
        graphdef: its modules.
        state: its parameters as ShapeDtypeStructs with shardings.
        likes: the state's leaves by dotted path, in flatten order.
        rules: one for each of them, those of plain parameters first: what is freed while others are
            rounded then leaves no holes between parameters.
        model_rules: those of all stages.
    """

    spec: ModelSpec
    mesh: Mesh
    dtype: np.dtype
    stage: Stage
    graphdef: nnx.GraphDef
    state: nnx.State
    likes: dict[str, jax.ShapeDtypeStruct]
    rules: list[Rule]
    model_rules: list[Rule]

    def filled(self, arrays: Mapping[str, jax.Array]) -> tuple[nnx.GraphDef, nnx.State]:
        """The model with these arrays."""
        leaves = [arrays[name] for name in self.likes]
        return self.graphdef, jax.tree.unflatten(jax.tree.structure(self.state), leaves)

    def at(self, stage: Stage) -> Outline:
        """The same model's outline of another stage; itself for its own."""
        if stage == self.stage:
            return self
        return outline(self.spec, self.mesh, self.dtype, stage)

    def rounding(self) -> Outline:
        """The same with all weights in few bits made of plain ones; itself where they are."""
        spec = self.spec.rounding()
        if spec is self.spec:
            return self
        return outline(spec, self.mesh, self.dtype, self.stage)


def outline(spec: ModelSpec, mesh: Mesh, dtype: DTypeLike, stage: Stage = WHOLE) -> Outline:
    """The outline of a model, or of one stage of it, over these devices.

    Raises ConfigError when the model does not divide over them.
    """
    divided = replace(spec, expert_groups=mesh.shape["expert"])
    model = build.outline(divided, layer_devices(mesh), dtype)
    model_rules = sorted(build.rules(divided, model), key=lambda rule: rule.rounded is not None)
    rules = model_rules if stage == WHOLE else build.keep_stage(model, model_rules, stage)
    graphdef, state = nnx.split(model)
    likes = _shapes(state, mesh)
    filled = [name for rule in rules for name in filled_by(rule, likes)]
    if sorted(filled) != sorted(likes):
        differing = sorted(set(filled) ^ set(likes))[:5]
        raise RuntimeError(f"the rules of {spec.model_type} and its parameters differ: {differing}")
    state = jax.tree.unflatten(jax.tree.structure(state), list(likes.values()))
    return Outline(
        spec=spec,
        mesh=mesh,
        dtype=np.dtype(dtype),
        stage=stage,
        graphdef=graphdef,
        state=state,
        likes=likes,
        rules=rules,
        model_rules=model_rules,
    )


def _shapes(state: nnx.State, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """A state's leaves by dotted path, with their shardings over the mesh."""
    parameters, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    likes = {}
    for path, parameter in parameters:
        shape = parameter.get_value()
        where = sharding(mesh, parameter.get_metadata("axes"))
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        likes[name] = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)
    return likes
