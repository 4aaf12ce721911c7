"""Facts of rows: a fake adapter column reaches the blocks, whichever rows go on and however the
blocks make their carries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from jaxllm.cache.collective import ALONE
from jaxllm.mesh import stages
from jaxllm.nn.blocks import Block, Carry
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.contexts.protocol import AttentionContext, RowContext
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import Embedding
from jaxllm.nn.linear import Init, OutputHead
from jaxllm.nn.norm import NoNorm
from jaxllm.nn.rope import NoRope, Rotation
from jaxllm.nn.row_facts import NO_FACTS, RowFacts, facts_of

TOKENS, VOCABULARY, WIDTH, LAYERS = 7, 11, 4, 4
TOKEN_T = jnp.array([3, 1, 4, 1, 5, 9, 2])
POSITION_T = jnp.arange(TOKENS)
ADAPTER_T = jnp.array([0, 2, 1, 0, 2, 1, 1])
# What an adapter adds, by its number
ADDED_AD = jnp.array([[0.0, 0.0, 0.0, 0.0], [1.0, -2.0, 0.5, 3.0], [-4.0, 0.25, 2.0, 1.0]])


class Cumulative(nnx.Module):
    """Attention: the sum of all rows so far."""

    def __call__(
        self, layer: int, normed_TD: Array, rotation: Rotation, context: AttentionContext
    ) -> Array:
        return jnp.cumsum(normed_TD, axis=0)


class Adapted(Block):
    """Adds what each row's adapter adds, and forgets the facts in the carries that it makes."""

    def attend(
        self, layer: int, carry: Carry, rotation: Rotation, context: AttentionContext
    ) -> Carry:
        x_TD = carry.settled(ALONE)
        added_TD = ADDED_AD[carry.facts["adapter"]]
        return Carry(x_TD + added_TD, self.attention(layer, x_TD, rotation, context))

    def feed_forward(self, carry: Carry, context: RowContext) -> Carry:
        x_TD = carry.settled(ALONE)
        facts = carry.facts
        scale_T = 0.5 + 0.1 * facts.token_T + 0.01 * facts.position_T
        return Carry(x_TD, scale_T[:, None] * ADDED_AD[facts["adapter"]] - 0.4 * x_TD)


def decoder() -> Decoder:
    init = Init(rngs=nnx.Rngs(3), dtype=jnp.float32)
    blocks = [
        Adapted(attention_norm=NoNorm(), attention=Cumulative(), mlp_norm=None, mlp=lambda *_: None)
        for _ in range(LAYERS)
    ]
    return Decoder(
        embed=Embedding(init, VOCABULARY, WIDTH, None),
        layers=blocks,
        norm=NoNorm(),
        head=OutputHead(init, VOCABULARY, WIDTH, "vocab", False),
        ropes=(NoRope(2),) * LAYERS,
    )


def facts() -> RowFacts:
    return facts_of(TOKEN_T, POSITION_T, adapter=ADAPTER_T)


def expected(model: Decoder) -> np.ndarray:
    """The hidden states by the definition."""
    assert model.embed is not None
    x_TD = np.asarray(model.embed.weight[...])[np.asarray(TOKEN_T)]
    added_TD = np.asarray(ADDED_AD)[np.asarray(ADAPTER_T)]
    scale_T1 = (0.5 + 0.1 * np.asarray(TOKEN_T) + 0.01 * np.arange(TOKENS))[:, None]
    for _ in range(LAYERS):
        x_TD = x_TD + added_TD + np.cumsum(x_TD, axis=0)
        x_TD = x_TD + scale_T1 * added_TD - 0.4 * x_TD
    return x_TD


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5, 6], [6, 0, 3], [2, 2]])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_bring_their_facts_to_every_block_of_every_stage(count: int, rows: list[int]) -> None:
    model = decoder()
    wanted = expected(model)
    context = DenseContext()
    handed_TD = None
    for stage in stages(count):
        part = nnx.clone(model)
        part.keep_stage(stage)
        if handed_TD is None:
            carry = part.embedded(facts(), context)
        else:
            carry = Carry(handed_TD, facts=facts())
        carry = part.through_layers(carry, context)
        if not stage.is_last:
            handed_TD = part.handed(carry, context)
    found = part.after_attention(carry.rows(jnp.array(rows)), context)
    np.testing.assert_allclose(found, wanted[rows], rtol=1e-5)


def test_facts_are_picked_again_from_picked_rows() -> None:
    picked = facts().rows(jnp.array([6, 0, 3])).rows(jnp.array([2, 0]))
    assert picked["adapter"].tolist() == [0, 1] and picked.position_T.tolist() == [3, 6]


def test_facts_pass_a_compiled_function() -> None:
    carry = Carry(jnp.zeros((TOKENS, WIDTH)), facts=facts())
    passed = jax.jit(lambda carry: carry.rows(jnp.array([5, 1])))(carry)
    assert passed.facts["adapter"].tolist() == [1, 2] and passed.facts.token_T.tolist() == [9, 1]


def test_a_fact_that_nobody_reads_is_in_no_program() -> None:
    def picked(carry: Carry, row_R: Array) -> Array:
        return carry.rows(row_R).x_TD

    bare = Carry(jnp.zeros((TOKENS, WIDTH)))
    row_R = jnp.array([5, 1])
    texts = [
        jax.jit(lambda row_R, carry=carry: picked(carry, row_R)).lower(row_R).as_text()
        for carry in (bare, bare._replace(facts=facts()))
    ]
    assert texts[0] == texts[1]


def test_a_fact_that_nobody_brings_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="adapter"):
        NO_FACTS["adapter"]
