"""A model that gives a vector for each prompt: a transformer without its output head, a pool over
hidden states, and linear maps behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.nn.blocks import Carry
from jaxllm.nn.contexts.protocol import AttentionContext, RowContext
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import EncoderEmbedding
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.norm import LayerNorm, NoNorm, Norm
from jaxllm.nn.row_facts import facts_of
from jaxllm.nn.rules import Rule
from jaxllm.pooling import LATE, DenseMap, Pooling

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "identity": lambda x: x,
        "tanh": jnp.tanh,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
        "sigmoid": jax.nn.sigmoid,
    }
)


class PoolingModel(nnx.Module):
    """`body` and what is made of its hidden states. All after them is computed in float32."""

    def __init__(self, init: Init, body: Decoder, pooling: Pooling):
        if not pooling.token_logits:
            body.head = body.logits_bias = None
        self.body = body
        exact = Init(init.rngs, jnp.float32)
        self.maps = nnx.List(
            Linear(exact, (dense.outputs,), (dense.inputs,), (None, "embed"), dense.bias)
            for dense in pooling.maps
        )
        self.norms = nnx.List(_norm(exact, dense) for dense in pooling.maps)
        self.pooling = pooling

    def __call__(
        self,
        token_T: Array,
        position_T: Array,
        start_R: Array,
        length_R: Array,
        context: AttentionContext,
    ) -> Array:
        """The vectors [R, E] of the prompts whose tokens are `start` to `start + length`, or [T, E]
        of all tokens, float32.

        A pool of last tokens computes the last feed-forward for these alone.
        """
        carry = self.body.through_attention(token_T, position_T, context)
        if self.pooling.takes_chunks:
            last_R = start_R + jnp.maximum(length_R - 1, 0)
            return self._mapped(self.body.after_attention(carry.rows(last_R), context), context)
        hidden_TD = self.body.after_attention(carry, context).astype(jnp.float32)
        return self._results(hidden_TD, start_R, length_R, context)

    def encode(
        self,
        token_T: Array,
        position_T: Array,
        second_T: Array,
        start_R: Array,
        length_R: Array,
        context: AttentionContext,
    ) -> Array:
        """The same results of an encoder; `second_T` is 1 for tokens of the second text of a
        pair."""
        embed = self.body.embed
        assert embed is not None
        second = (second_T,) if isinstance(embed, EncoderEmbedding) else ()
        x_TD = embed(token_T, position_T, context, *second)
        carry = Carry(x_TD, facts=facts_of(token_T, position_T))
        carry = self.body.through_layers(carry, context)
        hidden_TD = self.body.after_attention(carry, context).astype(jnp.float32)
        return self._results(hidden_TD, start_R, length_R, context)

    def rules(self, names: Mapping[str, tuple[str, ...]]) -> Iterator[Rule]:
        """The checkpoint tensors that fill each parameter; `names` are those of the body."""
        for rule in self.body.rules(names):
            yield replace(rule, parameter=f"body.{rule.parameter}")
        for index, dense in enumerate(self.pooling.maps):
            for rule in self.maps[index].rules(dense.name):
                yield replace(rule, parameter=f"maps.{index}.{rule.parameter}")
            if not dense.norm:
                continue
            for rule in self.norms[index].rules(dense.norm):
                yield replace(rule, parameter=f"norms.{index}.{rule.parameter}")

    def _results(
        self, hidden_TD: Array, start_R: Array, length_R: Array, context: RowContext
    ) -> Array:
        if self.pooling.of_tokens:
            return self._mapped(hidden_TD, context)
        if self.pooling.modes == (LATE,):
            return pooled(("mean",), self._mapped(hidden_TD, context), start_R, length_R)
        return self._mapped(pooled(self.pooling.modes, hidden_TD, start_R, length_R), context)

    def _mapped(self, pooled_RD: Array, context: RowContext) -> Array:
        if self.pooling.token_logits:
            return self._token_logits(pooled_RD, context)
        x = pooled_RD.astype(jnp.float32)
        for module, norm, dense in zip(self.maps, self.norms, self.pooling.maps, strict=True):
            x = norm(ACTIVATIONS[dense.activation](module(x, context)))
        return x

    def _token_logits(self, hidden_RD: Array, context: RowContext) -> Array:
        """[R, labels]: logits of single tokens, and differences of two; the vocabulary's others are
        not computed."""
        first, second = zip(*self.pooling.token_logits, strict=True)
        plus = self.body.token_logits(hidden_RD, first, context)
        others = tuple(token or 0 for token in second)
        minus = self.body.token_logits(hidden_RD, others, context)
        return plus - jnp.where(jnp.array([token is not None for token in second]), minus, 0.0)


def _norm(init: Init, dense: DenseMap) -> Norm:
    """The norm behind a dense map, where the map has one."""
    if dense.norm:
        return LayerNorm(init, dense.outputs, dense.norm_eps, dense.norm_bias)
    return NoNorm()


def pooled(modes: tuple[str, ...], hidden_TD: Array, start_R: Array, length_R: Array) -> Array:
    """[R, D · modes]: the pools of each prompt's hidden states, side by side, as
    sentence-transformers defines them. Sums are float32."""
    index_T = jnp.arange(hidden_TD.shape[0])
    place_RT = index_T - start_R[:, None]  # of a token in its prompt
    inside_RT = (place_RT >= 0) & (place_RT < length_R[:, None])
    count_R1 = jnp.maximum(length_R, 1).astype(jnp.float32)[:, None]

    def total(weight_RT: Array) -> Array:
        weight_RT = jnp.where(inside_RT, weight_RT, 0.0)
        return jnp.matmul(weight_RT, hidden_TD, precision=jax.lax.Precision.HIGHEST)

    def largest() -> Array:
        low = jnp.finfo(jnp.float32).min
        row_T = jnp.where(jnp.any(inside_RT, axis=0), jnp.argmax(inside_RT, axis=0), -1)
        found_RD = jnp.full((start_R.shape[0], hidden_TD.shape[1]), low)
        return found_RD.at[row_T].max(hidden_TD, mode="drop", wrap_negative_indices=False)

    makers: dict[str, Callable[[], Array]] = {
        "last": lambda: hidden_TD[start_R + jnp.maximum(length_R - 1, 0)],
        "cls": lambda: hidden_TD[start_R],
        "mean": lambda: total(jnp.ones_like(place_RT, jnp.float32)) / count_R1,
        "mean_sqrt_len": lambda: total(jnp.ones_like(place_RT, jnp.float32)) / count_R1**0.5,
        "weighted_mean": lambda: (
            total((place_RT + 1).astype(jnp.float32)) / (count_R1 * (count_R1 + 1) / 2)
        ),
        "max": largest,
    }
    return jnp.concatenate([makers[mode]() for mode in modes], axis=1)
