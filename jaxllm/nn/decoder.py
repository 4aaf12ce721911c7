"""A decoder-only transformer made of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import cast

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.mesh import Stage
from jaxllm.nn.blocks import Block, Carry
from jaxllm.nn.contexts.protocol import AttentionContext, RowContext
from jaxllm.nn.embedding import Embedding, LogitsBias
from jaxllm.nn.linear import Linear, OutputHead
from jaxllm.nn.logits import LogitsMap
from jaxllm.nn.norm import Norm
from jaxllm.nn.rope import Rope
from jaxllm.nn.row_facts import RowFacts, facts_of
from jaxllm.nn.rules import Rule
from jaxllm.nn.weight.parameters import contract
from jaxllm.nn.weight.protocol import HeadWeight


class Decoder(nnx.Module):
    """Embedding, blocks, final norm, output head (None when tied to the embedding).

    A tied model may have a `logits_bias`. `project` maps what the final norm gives to the width of
    the head, where that is another; None leaves it. `ropes` has the rotary embedding of each layer;
    layers with equal ones share its angles. `logits_maps` are applied to the logits in their order.
    A stage of a pipeline has some of the layers, and None where another stage has the rest
    (`keep_stage`).
    """

    def __init__(
        self,
        *,
        embed: Embedding,
        layers: Iterable[Block],
        norm: Norm,
        head: OutputHead | None,
        ropes: tuple[Rope, ...],
        logits_maps: tuple[LogitsMap, ...] = (),
        logits_bias: LogitsBias | None = None,
        project: Linear | None = None,
    ):
        self.embed: Embedding | None = embed
        self.layers = nnx.List(layers)
        self.norm: Norm | None = norm
        self.head = head
        self.ropes = ropes
        self.logits_maps = logits_maps
        self.logits_bias = logits_bias
        self.project = project

    def __call__(self, token_T: Array, position_T: Array, context: AttentionContext) -> Array:
        """Hidden states that the head reads, [T, D].

        Tokens of several sequences may be mixed: the context keeps them apart.
        """
        return self.after_attention(self.through_attention(token_T, position_T, context), context)

    def embedded(self, facts: RowFacts, context: AttentionContext) -> Carry:
        """What enters the first layer."""
        assert self.embed is not None, "tokens enter the first stage alone"
        x_TD = self.embed(facts.token_T, facts.position_T, context)
        return Carry(x_TD, facts=facts)

    def through_attention(
        self, token_T: Array, position_T: Array, context: AttentionContext
    ) -> Carry:
        """The carry of a whole model after the last attention.

        Up to here tokens see each other. `after_attention` then needs only the rows whose hidden
        states are wanted: one of a prompt.
        """
        carry = self.embedded(facts_of(token_T, position_T), context)
        return self.through_layers(carry, context)

    def through_layers(self, carry: Carry, context: AttentionContext) -> Carry:
        """The carry after the last attention, of what enters the first layer here: embedded tokens,
        or what the stage before has `handed` on."""
        facts = carry.facts
        rotations = {
            rope: rope(facts.position_T, context.prompt_length_T)
            for rope in dict.fromkeys(self.ropes)
        }
        for index, (block, rope) in enumerate(zip(self.layers, self.ropes, strict=True)):
            if index:
                carry = self.layers[index - 1].feed_forward(carry, context)._replace(facts=facts)
            carry = block.attend(index, carry, rotations[rope], context)._replace(facts=facts)
        return carry

    def handed(self, carry: Carry, context: RowContext) -> Array:
        """The residual stream behind the last layer, [T, D], for the stage that follows."""
        return self.layers[-1].feed_forward(carry, context).settled(context.collective)

    def after_attention(self, carry: Carry, context: RowContext) -> Array:
        """Hidden states that the head reads, [R, D], of any rows of `through_attention`."""
        assert self.norm is not None
        normed_RD = self.layers[-1].feed_forward(carry, context).normed(self.norm, context)[1]
        if self.project is None:
            return normed_RD
        return self.project(normed_RD, context)

    def unpacked(self, packed_RE: Array) -> Carry:
        """The carry of which `Carry.packed` made these rows, summed over devices. It has no
        facts: who needs some brings them."""
        if self.project is None:
            width = self._head_sizes[1]
        else:
            width = self.project.inp[0]
        beside_RE = None
        if packed_RE.shape[1] > width:
            beside_RE = packed_RE[:, width:]
        return Carry(packed_RE[:, :width], None, beside_RE)

    def keep_stage(self, stage: Stage) -> None:
        """Drop what other stages have. The table of a tied model is with the first and the last."""
        layers = stage.layers(len(self.layers))
        self.layers = nnx.List(self.layers[layer] for layer in layers)
        self.ropes = tuple(self.ropes[layer] for layer in layers)
        if not stage.is_first and not (stage.is_last and self.head is None):
            self.embed = None
        if not stage.is_last:
            self.norm = self.head = self.logits_bias = self.project = None

    def rules(self, names: Mapping[str, tuple[str, ...]]) -> Iterator[Rule]:
        """The checkpoint tensors that fill each module with a weight.

        `names` maps a module's dotted path, with {} for a layer's number, to the names of its
        checkpoint tensors without ".weight" and ".bias". Raises KeyError when a module is not in
        it.
        """
        for path, module, tensors in self.named(names):
            for rule in module.rules(*tensors):
                yield replace(rule, parameter=f"{path}.{rule.parameter}")

    def named(
        self, names: Mapping[str, tuple[str, ...]]
    ) -> Iterator[tuple[str, nnx.Module, tuple[str, ...]]]:
        """The path of each module with a weight, the module, and its names in the checkpoint."""
        for path, module in nnx.iter_modules(self):
            if not hasattr(module, "weight"):
                continue
            numbers = [step for step in path if isinstance(step, int)]
            key = ".".join("{}" if isinstance(step, int) else str(step) for step in path)
            tensors = tuple(name.format(*numbers) for name in names[key])
            yield ".".join(map(str, path)), module, tensors

    def logits(self, hidden_RD: Array, context: RowContext) -> Array:
        """Next-token logits [R, V] in float32; of this device's own share of the vocabulary where
        it is split."""
        weight, bias_V = self._head()
        vocab, _ = self._head_sizes
        return self._mapped(weight.sums(hidden_RD, context)[:, :vocab], bias_V)

    def token_logits(self, hidden_RD: Array, tokens: tuple[int, ...], context: RowContext) -> Array:
        """The logits of some tokens alone."""
        weight, bias = self._head()
        vocab, _ = self._head_sizes
        token_N = jnp.array(tokens)
        if bias is not None:
            bias = context.collective.rows(bias.__getitem__, token_N, len(bias), vocab)
        weight_ND = weight.looked_up(token_N, context, vocab)
        return self._mapped(contract(hidden_RD, weight_ND, 1, jnp.float32), bias)

    @property
    def _head_sizes(self) -> tuple[int, int]:
        """V and D."""
        if self.head is not None:
            (vocab,) = self.head.out
            (width,) = self.head.inp
            return vocab, width
        assert self.embed is not None
        return self.embed.vocab, self.embed.width

    def _head(self) -> tuple[HeadWeight, Array | None]:
        """The weight and the bias of the head."""
        bias = None
        if self.head is None:
            table = self.embed
            if self.logits_bias is not None:
                bias = self.logits_bias.weight[...]
        else:
            table = self.head
            if self.head.bias is not None:
                bias = self.head.bias[...]
        assert table is not None
        # A table that is the head is held as one
        return cast(HeadWeight, table.weight), bias

    def _mapped(self, logits_RV: Array, bias_V: Array | None) -> Array:
        if bias_V is not None:
            logits_RV = logits_RV + bias_V.astype(jnp.float32)
        for change in self.logits_maps:
            logits_RV = change(logits_RV)
        return logits_RV
