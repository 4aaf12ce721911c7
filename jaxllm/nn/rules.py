"""The rule table: which checkpoint tensors make which parameter. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxllm.nn.heads import Heads


@dataclass(frozen=True)
class Piece:
    """Part of a parameter: the checkpoint tensor `name` of shape `source`, seen as shape `view`.

    The view fills parameter[:, start : start + view[1]] (the whole parameter when it has one axis).
    `repeat` > 1 gives every entry of the view's first axis to that many entries of the parameter's.
    """

    name: str
    source: tuple[int, ...]
    view: tuple[int, ...]
    start: int = 0
    repeat: int = 1


@dataclass(frozen=True)
class Rule:
    """One parameter (dotted path in the model) and the pieces that fill it completely."""

    parameter: str
    pieces: tuple[Piece, ...]


def copied(parameter: str, name: str, *shape: int) -> Rule:
    """A parameter that is a checkpoint tensor as it is."""
    return Rule(parameter, (Piece(name, shape, shape),))


def qkv(parameter: str, names: tuple[str, str, str], heads: Heads, width: int | None) -> Rule:
    """Fused query, key and value: [X, (N+2K)/X, H, D], or a bias [X, (N+2K)/X, H] when `width` is
    None.
    """
    tail = () if width is None else (width,)
    query, key, value = names
    n, k = heads.query_per_shard, heads.kv_per_shard
    pieces = [Piece(query, (heads.query * heads.dim, *tail), (heads.shards, n, heads.dim, *tail))]
    for name, start in ((key, n), (value, n + k)):
        view = (heads.shards // heads.repeat, k, heads.dim, *tail)
        pieces.append(Piece(name, (heads.kv * heads.dim, *tail), view, start, heads.repeat))
    return Rule(parameter, tuple(pieces))


def gate_up(
    parameter: str, names: tuple[str, str], shards: int, inner: int, width: int | None
) -> Rule:
    """Fused gate and up: [X, 2, F/X, D], or a bias [X, 2, F/X] when `width` is None."""
    tail = () if width is None else (width,)
    view = (shards, 1, inner // shards, *tail)
    return Rule(
        parameter,
        tuple(Piece(name, (inner, *tail), view, start) for start, name in enumerate(names)),
    )


def attention(
    layer: int,
    heads: Heads,
    width: int,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
) -> Iterator[Rule]:
    """A layer's attention under the tensor names that Llama introduced."""
    ours, theirs = f"layers.{layer}.attention", f"model.layers.{layer}.self_attn"
    yield qkv(f"{ours}.qkv.weight", _qkv_names(theirs, "weight"), heads, width)
    yield Rule(f"{ours}.out.weight", (_output(f"{theirs}.o_proj.weight", heads, width),))
    if qkv_bias:
        yield qkv(f"{ours}.qkv.bias", _qkv_names(theirs, "bias"), heads, None)
    if out_bias:
        yield copied(f"{ours}.out.bias", f"{theirs}.o_proj.bias", width)
    if qk_norm:
        yield copied(f"{ours}.q_norm.weight", f"{theirs}.q_norm.weight", heads.dim)
        yield copied(f"{ours}.k_norm.weight", f"{theirs}.k_norm.weight", heads.dim)


def mlp(layer: int, shards: int, inner: int, width: int, *, bias: bool = False) -> Iterator[Rule]:
    """A layer's gated feed-forward block under the tensor names that Llama introduced."""
    ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    yield gate_up(
        f"{ours}.gate_up.weight",
        (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"),
        shards,
        inner,
        width,
    )
    yield copied(f"{ours}.down.weight", f"{theirs}.down_proj.weight", width, inner)
    if bias:
        yield gate_up(
            f"{ours}.gate_up.bias",
            (f"{theirs}.gate_proj.bias", f"{theirs}.up_proj.bias"),
            shards,
            inner,
            None,
        )
        yield copied(f"{ours}.down.bias", f"{theirs}.down_proj.bias", width)


def norms(layer: int, width: int) -> Iterator[Rule]:
    """A layer's two norms under the tensor names that Llama introduced."""
    theirs = f"model.layers.{layer}"
    yield copied(f"layers.{layer}.attention_norm.weight", f"{theirs}.input_layernorm.weight", width)
    yield copied(
        f"layers.{layer}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", width
    )


def ends(vocab: int, width: int, *, tied: bool) -> Iterator[Rule]:
    """Embedding, final norm and, unless tied, the output head."""
    yield copied("embed.weight", "model.embed_tokens.weight", vocab, width)
    yield copied("norm.weight", "model.norm.weight", width)
    if not tied:
        yield copied("head.weight", "lm_head.weight", vocab, width)


def _qkv_names(prefix: str, suffix: str) -> tuple[str, str, str]:
    return f"{prefix}.q_proj.{suffix}", f"{prefix}.k_proj.{suffix}", f"{prefix}.v_proj.{suffix}"


def _output(name: str, heads: Heads, width: int) -> Piece:
    return Piece(name, (width, heads.query * heads.dim), (width, heads.query, heads.dim))
