"""Multi-head attention with fused, shard-interleaved projections; the context owns keys and values."""

from __future__ import annotations

from typing import Protocol

from flax import nnx
from jax import Array

from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.rope import Rotation, rotate


class AttentionContext(Protocol):
    """Where keys and values live during one forward. K counts stored KV heads (copies included).

    `prompt_length_T` (int32) is the prompt length of each token's request, None when all tokens are one prompt. Only dynamic
    RoPE scaling reads it.
    """

    @property
    def prompt_length_T(self) -> Array | None: ...

    def attend(
        self, layer: int, q_TNH: Array, k_TKH: Array, v_TKH: Array, *, scale: float, window: int | None, softcap: float | None
    ) -> Array:
        """Remember k and v of these tokens and return their attention output, [T, N, H] in q's dtype."""
        ...


class Attention(nnx.Module):
    """Projections, optional QK-norm, RoPE, the context's attention, output projection.

    `qkv` is [X, (N + 2K)/X, H, D]: per shard its query heads, its key heads, its value heads. `window` counts the tokens
    that a token may see, itself included; None sees all.
    """

    def __init__(
        self,
        init: Init,
        heads: Heads,
        width: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
    ):
        rows = heads.query_per_shard + 2 * heads.kv_per_shard
        self.qkv = Linear(init, (heads.shards, rows, heads.dim), (width,), ("shard", None, "head_dim", "embed"), qkv_bias)
        self.out = Linear(init, (width,), (heads.query, heads.dim), ("embed", "heads", "head_dim"), out_bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(init, heads.dim, qk_norm_eps, "head_dim")
        self.k_norm = None if qk_norm_eps is None else RMSNorm(init, heads.dim, qk_norm_eps, "head_dim")
        self.heads = heads
        self.window = window

    def __call__(self, layer: int, x_TD: Array, rotation: Rotation, context: AttentionContext) -> Array:
        q_TNH, k_TKH, v_TKH = self._project(x_TD)
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        q_TNH, k_TKH = rotate(q_TNH, rotation), rotate(k_TKH, rotation)
        scale = self.heads.dim**-0.5
        o_TNH = context.attend(layer, q_TNH, k_TKH, v_TKH, scale=scale, window=self.window, softcap=None)
        return self.out(o_TNH)

    def _project(self, x_TD: Array) -> tuple[Array, Array, Array]:
        """Heads in the model's order: shard x holds query heads x·N/X … and the KV heads that serve them."""
        heads, tokens = self.heads, x_TD.shape[0]
        qkv_TXCH = self.qkv(x_TD)
        n, k = heads.query_per_shard, heads.kv_per_shard
        q = qkv_TXCH[:, :, :n].reshape(tokens, heads.query, heads.dim)
        k_TKH = qkv_TXCH[:, :, n : n + k].reshape(tokens, heads.kv_stored, heads.dim)
        v_TKH = qkv_TXCH[:, :, n + k :].reshape(tokens, heads.kv_stored, heads.dim)
        return q, k_TKH, v_TKH
