"""What a model asks of the context that runs it: attention, and fused row operations."""

from __future__ import annotations

from typing import Any, Protocol

from jax import Array

from jaxllm.cache.collective import Collective
from jaxllm.cache.states import Cell
from pallas_kernels.grouped_matmul import Experts, Gating, Groups
from pallas_kernels.latent_decode import LatentRows
from pallas_kernels.parts import Product
from pallas_kernels.rope_write import HeadRows
from pallas_kernels.route import Rule
from pallas_kernels.scaled_matmul import Inputs, Rounding
from pallas_kernels.target import Target


class RowContext(Protocol):
    """Computes what lies between the linear maps of a block, for each token by itself.

    Attributes:
        target: for which kernels of such work are chosen.
        collective: the devices that share the block.
    """

    @property
    def target(self) -> Target: ...

    @property
    def collective(self) -> Collective: ...

    @property
    def alone(self) -> RowContext:
        """The same context for products that are no part of a sum over devices."""

    @property
    def of_expert(self) -> RowContext:
        """The same context over the devices that share an expert."""

    def add_norm(
        self,
        x_TD: Array,
        part_TD: Product,
        weight_D: Array,
        eps: float,
        rounding: Rounding | None = None,
    ) -> tuple[Array, Inputs]:
        """`x` plus the sum of all devices' parts, and its root-mean-square norm times the weight;
        that is rounded, if a `rounding` is asked for.

        See `pallas_kernels.add_norm`.
        """

    def product(self, x: Array, weight: Array, dims: int) -> Product | None:
        """`[T, *inp]` → `[T, *out]`: the last `dims` axes are contracted; in parts, for a reader
        that adds them up, where the back end has some. None where XLA's product is as fast.

        See `pallas_kernels.matmul`.
        """

    def gated_product(self, x_TD: Array, weight_X2FD: Array, gating: Gating) -> Array | None:
        """gating(gate(x), up(x)) `[T, X·F]` in one pass; None where two products are faster.

        See `pallas_kernels.gated_matmul`.
        """

    def route(
        self, logit_TE: Array, correction_E: Array | None, rule: Rule
    ) -> tuple[Groups, Array]:
        """The rows of each expert, and the weights of each token's choices `[T, K]` (float32).

        See `pallas_kernels.route`.
        """

    def grouped_product(
        self,
        x_PI: Array,
        weight_EOI: Array,
        groups: Groups,
        bias_EO: Array | None = None,
        gating: Gating | None = None,
    ) -> Array:
        """Each row times the weight of its expert, plus its bias; with `gating`, of gate and up.

        See `pallas_kernels.grouped_matmul`.
        """

    def routed(self, x_PI: Array, experts: Experts, groups: Groups, gating: Gating) -> Array | None:
        """down(gating(gate(x), up(x))) of each row's expert; None where two products are as fast.

        See `pallas_kernels.grouped_matmul.feed_forward`.
        """


class AttentionContext(RowContext, Protocol):
    """Holds keys and values during one forward.

    Attributes:
        prompt_length_T: prompt length of each token's request (int32); None when all tokens are
            one prompt. Only dynamic RoPE scaling reads it.
    """

    @property
    def prompt_length_T(self) -> Array | None: ...

    def attend(
        self,
        layer: int,
        rows: HeadRows,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Array | None = None,
    ) -> Array:
        """Attention output `[T, N, H]` in the dtype of the rows `[T, X, C, H]` of X shards.

        Bias, norm and RoPE are applied to the rows; keys and values of these tokens are kept.
        `sinks` `[N]` adds one logit per query head to the softmax's denominator, unscaled. Rows
        without key heads attend to what `layer`, an earlier one, has kept, and keep nothing.
        """


class StateContext(RowContext, Protocol):
    """Holds a state of each sequence during one forward, in place of what its tokens were."""

    def scan(self, layer: int, cell: Cell, rows: Any) -> Any:
        """What `cell(state, row)` gives for each token beside the next state, in the order of a
        sequence's tokens: `rows` and the result are trees of `[T, …]`.

        The state before the first token of a sequence is zeros; that after its last token here is
        kept.
        """


class LatentContext(RowContext, Protocol):
    """Holds one entry a token during one forward, in place of keys and values."""

    def attend_latent(self, layer: int, rows: LatentRows, *, scale: float) -> Array:
        """Attention output `[T, N, F]` in the dtype of the queries; the tokens' entries are
        kept."""
