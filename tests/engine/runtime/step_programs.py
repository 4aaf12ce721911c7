"""The lattice of a model that is not loaded, for tests that lower or compile its programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm import models, weights
from jaxllm.cache.arrays import PagedArrays
from jaxllm.cache.backends import stored_dim
from jaxllm.cache.groups import cache_groups, layer_places
from jaxllm.engine.runtime.lattice import Programs, weight_leaves
from jaxllm.engine.runtime.shapes import Model, StepShapes, packed_carries
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.startup.model_plan import largest_inboxes
from jaxllm.mesh import WHOLE
from jaxllm.models.config.build import head_name, table_name
from jaxllm.quantisation import WeightFormat
from tests.targets import TARGETS


def lattice(
    config: dict[str, Any],
    mesh: Mesh,
    backend: str,
    buckets: Buckets,
    *,
    page_size: int,
    pages: int,
    kv_dtype: str = "bfloat16",
    pages_per_request: int = 16,
    quantization: str | None = None,
    peers: bool = False,
    head: WeightFormat | None = None,
    **more: Any,
) -> Programs:
    """Programs of a model in bfloat16 from its config.json, over one pool of `pages`, with weights
    as `--quantization` rounds them and its `head` in this format. With `peers`, devices add up
    through inboxes. `more` are fields of `StepShapes`."""
    spec = replace(models.make_spec(config), pooling=more.get("pooling"))
    ends = {} if head is None else {table_name(spec) if spec.tied else head_name(spec): head}
    formats = weights.weight_formats("", spec, quantization, "dummy")
    spec = replace(spec, formats={**formats, **ends})
    spec = spec.with_heads_of(stored_dim(backend, spec.heads(1).dim, kv_dtype))
    stage = more.get("stage", WHOLE)
    outline = weights.outline(spec, mesh, jnp.bfloat16, stage)
    leaves, treedef = weight_leaves(outline.state)
    layers = stage.layers(len(spec.layers))
    groups = cache_groups(spec.layers, [None] * len(spec.layers))
    (group,) = groups
    pool = PagedArrays.abstract(
        group.spec, len(layers), pages, page_size, jnp.dtype(kv_dtype), mesh
    )
    states = packed_carries(mesh, buckets.max_tokens, spec.carry_width, jnp.bfloat16)
    inboxes = largest_inboxes(mesh, spec, buckets) if peers else None
    return Programs(
        StepShapes(
            model=Model(
                outline.graphdef,
                treedef,
                mesh,
                backend,
                TARGETS[backend],
                page_size,
                layer_places(groups, spec.layers, layers),
                peers=inboxes,
            ),
            weights=leaves,
            kv=(pool,),
            slots=buckets.decode[-1],
            table_width=pages_per_request,
            hidden_states=states,
            vocab_size=spec.vocab_size,
            buckets=buckets,
            hidden_width=spec.width,
            **more,
        )
    )
