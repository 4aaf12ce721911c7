"""A model whose layers are divided into stages computes what it computes in one piece."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.mesh import WHOLE, Stage, make_mesh, make_stage_meshes, stages
from jaxllm.nn.blocks import Carry
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.row_facts import facts_of
from tests.goldens.golden import golden_names, load_golden

BOUND = 1e-4


def test_the_layers_of_all_stages_are_those_of_the_model_in_order() -> None:
    for total in range(1, 12):
        for count in range(1, total + 1):
            own = [stage.layers(total) for stage in stages(count)]
            assert [layer for some in own for layer in some] == list(range(total))
            assert max(map(len, own)) - min(map(len, own)) <= 1
            assert len(own[-1]) == min(map(len, own)), "the last has the head, too"
    assert stages(1) == (WHOLE,)


@pytest.mark.slow
@pytest.mark.parametrize("name", golden_names())
def test_hidden_states_that_stages_hand_on_give_the_logits_of_the_whole_model(name: str) -> None:
    golden = load_golden(name)
    prompt = max((c.prompt for c in golden.continuations), key=len)
    spec = models.read_spec(golden.directory).serving(len(prompt))
    count = min(2, len(spec.layers))
    token_T, position_T = jnp.array(prompt), jnp.arange(len(prompt))
    meshes = make_stage_meshes(1, count)

    def loaded(stage: Stage) -> nnx.Module:
        own = weights.load(
            golden.directory, weights.outline(spec, meshes[stage.index], jnp.float32, stage)
        )
        return nnx.merge(*own)

    whole, context = loaded(WHOLE), DenseContext()
    wanted = whole.logits(whole(token_T, position_T, context), context)
    for stage in stages(count):
        module = loaded(stage)
        if stage.is_first:
            carry = module.embedded(facts_of(token_T, position_T), context)
        carry = module.through_layers(carry, context)
        if not stage.is_last:
            (after,) = meshes[stage.index + 1].devices.flat
            handed_TD = jax.device_put(module.handed(carry, context), after)
            facts = facts_of(*jax.device_put((token_T, position_T), after))
            carry = Carry(handed_TD, facts=facts)
    found = module.logits(module.after_attention(carry, context), context)
    np.testing.assert_allclose(found, wanted, atol=BOUND, rtol=0)


def test_a_stage_has_the_weights_of_its_own_layers_alone() -> None:
    golden = load_golden("gpt2-tied")
    spec, mesh = models.read_spec(golden.directory), make_mesh(1)
    shapes = [weights.outline(spec, mesh, jnp.float32, stage).state for stage in stages(2)]
    first, last = (set(state) for state in shapes)
    assert first == {"embed", "layers"}, "no norm, no head"
    assert last == {"embed", "layers", "norm"}, "the head of a tied model is its token table"
    untied = load_golden("llama-gqa")
    spec = models.read_spec(untied.directory)
    shapes = [weights.outline(spec, mesh, jnp.float32, stage).state for stage in stages(2)]
    assert [set(state) for state in shapes] == [{"embed", "layers"}, {"layers", "norm", "head"}]


def test_stages_have_devices_of_their_own_and_too_few_of_these_are_refused() -> None:
    meshes = make_stage_meshes(2, 3)
    numbers = [[device.id for device in mesh.devices.flat] for mesh in meshes]
    assert numbers == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="3 stages of 4 devices need 12 devices, but there are 8"):
        make_stage_meshes(4, 3)
