"""`ModelSpec`: everything the engine knows of a model. Imports no jax.

The engine, the weights and the server read this value alone; the keys of `config.json` stay in
`jaxllm/models`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxllm.cache.layer import LayerCache, ScaleTensors, attention_cache, own_cache
from jaxllm.config import ConfigError
from jaxllm.models.config.pooling import Wish, read_pooling
from jaxllm.models.config.quantisation import weight_scheme
from jaxllm.models.config.read import (
    common_keys,
    eos_token_ids,
    family,
    named_as_in_file,
    read_config,
)
from jaxllm.models.config.sentence_transformers import length_limit
from jaxllm.nn.heads import Heads
from jaxllm.pooling import DenseMap, Pooling
from jaxllm.quantisation import Scheme, WeightFormat

logger = logging.getLogger("jaxllm.models")


@dataclass(frozen=True)
class Mixture:
    """Sizes of a routed feed-forward.

    Attributes:
        experts: number of experts.
        choices: experts that compute a token.
        inner: width of an expert.
    """

    experts: int
    choices: int
    inner: int


@dataclass(frozen=True)
class ModelSpec:
    """A model before anything of it is built, whatever the number of devices. Specs made twice of
    the same configuration and wishes are equal, and hash alike.

    Attributes:
        model_type: the family, a file of `jaxllm/models`.
        vocab_size: width of the logits.
        width: width of the residual stream.
        inner_width: values of the widest feed-forward product of a token.
        query_heads: attention heads of a layer.
        layers: what each layer remembers of earlier tokens.
        context_length: tokens that the model is made for.
        shared_length: sequences up to this length may share cached keys; beyond it a key depends on
            its prompt's length. None: keys never depend on it.
        eos_token_ids: ids that end a sequence, in ascending order.
        stored_dtype: dtype that the checkpoint claims to hold; None when it does not say.
        kv_cache_dtype: the checkpoint's wish for `--kv-cache-dtype`, "auto" for none.
        tied: the output head is the token embedding.
        norm_eps: added to the mean square of norms.
        activation: of the feed-forward blocks, a key of `nn.mlp.ACTIVATIONS`.
        ropes: the rotary embedding of each layer, a `nn.rope.Rope`.
        carry_width: values of a token between its last attention and the feed-forward after it.
        served_length: tokens of the longest sequence that is served.
        config: the complete `config.json`, for the family's `build` alone.
        pooling: what is made of hidden states in place of logits; None when the model generates.
        scheme: how the checkpoint packs weights in fewer bits; None when they are plain numbers.
        formats: what weights of linear maps, of experts, of the table and of the head are held in,
            by the names of all their tensors without ".weight"; others are plain numbers.
        mixture: sizes of the layers that are mixtures of experts; None where none is.
        expert_groups: of the devices, each with experts of its own.
    """

    model_type: str
    vocab_size: int
    width: int
    inner_width: int
    query_heads: int
    layers: tuple[LayerCache, ...]
    context_length: int
    shared_length: int | None
    eos_token_ids: tuple[int, ...]
    stored_dtype: str | None
    kv_cache_dtype: str
    tied: bool
    norm_eps: float
    activation: str
    ropes: tuple[Any, ...]
    carry_width: int
    served_length: int
    config: Mapping[str, Any] = field(repr=False, hash=False)
    pooling: Pooling | None = None
    scheme: Scheme | None = None
    formats: Mapping[str, WeightFormat] = field(default_factory=dict, hash=False)
    mixture: Mixture | None = None
    expert_groups: int = 1

    @property
    def caches(self) -> bool:
        """Whether its layers remember anything between steps."""
        return self.pooling is None or not self.pooling.bidirectional

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window behind which each layer's cache forgets, in tokens; None for all."""
        return tuple(layer.window if self.caches else None for layer in self.layers)

    @property
    def has_head(self) -> bool:
        """Whether hidden states become logits."""
        return self.pooling is None or bool(self.pooling.token_logits)

    def heads(self, shards: int, layer: int | None = None) -> Heads:
        """The attention heads of a layer over `shards` tensor shards; None: of the first that
        attends.

        Raises ConfigError when they do not divide.
        """
        cache = attention_cache(self.layers, layer)
        heads = Heads(
            self.query_heads, cache.heads, cache.key_dim, shards, cache.order, cache.width
        )
        if problem := heads.problem():
            remedy = "config.json is inconsistent"
            if shards > 1:
                remedy = "choose a tensor_parallel_size that divides the heads"
            raise ConfigError(f"{problem}; {remedy}")
        return heads

    @property
    def rounding_refusal(self) -> str | None:
        """Why 8 bits cannot hold its pages; None where they can."""
        return _first(layer.rounding_refusal for layer in self.layers)

    @property
    def move_refusal(self) -> str | None:
        """Why what it remembers cannot leave the device; None where it can."""
        refusal = _first(layer.move_refusal for layer in self.layers)
        pages = {own_cache(self.layers, layer).living(None) for layer in self.attention_layers}
        if refusal is None and len(pages) > 1:
            return "pages of layers whose KV heads are unlike stay on the device"
        return refusal

    @property
    def prefix_refusal(self) -> str | None:
        """Why no request may start from what another one has computed; None where it may."""
        return _first(layer.prefix_refusal for layer in self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that attend."""
        numbers = range(len(self.layers))
        return tuple(layer for layer in numbers if own_cache(self.layers, layer).has_pages)

    def keys_vary(self, length: int) -> bool:
        """Whether keys of sequences of `length` tokens depend on their prompt's length, so that
        prompts cannot share pages."""
        return self.shared_length is not None and length > self.shared_length

    def first_layers(self, count: int) -> ModelSpec:
        """The same model cut off after `count` layers."""
        return replace(self, layers=self.layers[:count], ropes=self.ropes[:count])

    def serving(self, length: int) -> ModelSpec:
        """The same model in an engine that serves sequences of up to `length` tokens."""
        ropes = tuple(rope.serving(length) for rope in self.ropes)
        return replace(self, served_length=length, ropes=ropes)

    def with_scales(self, scales: Iterable[Iterable[Any] | None]) -> ModelSpec:
        """The same model with the checkpoint's own scales for 8-bit pages, layer by layer; without
        any where `scales` is empty."""
        checked: list[ScaleTensors | None] = [
            None if scale is None else tuple((name, tuple(shape)) for name, shape in scale)
            for scale in scales
        ]
        checked += [None] * (len(self.layers) - len(checked))
        layers = (layer.scaled(scale) for layer, scale in zip(self.layers, checked, strict=True))
        return replace(self, layers=tuple(layers))

    def rounding(self) -> ModelSpec:
        """The same model, whose weights in few bits are made of plain ones at load; itself where
        they are already, or there are none."""
        kinds = {
            name: replace(weight_format, rounded=True)
            for name, weight_format in self.formats.items()
        }
        if kinds == self.formats:
            return self
        return replace(self, formats=kinds)

    def with_widths(self, widths: Iterable[int | None]) -> ModelSpec:
        """The same model with the heads of each layer stored at its width; None is their own."""
        layers = (layer.stored_at(width) for layer, width in zip(self.layers, widths, strict=True))
        return replace(self, layers=tuple(layers))

    def with_heads_of(self, width: int | None) -> ModelSpec:
        """The same model with the heads of all layers stored at this width."""
        return self.with_widths([width] * len(self.layers))

    def to_dict(self) -> dict[str, Any]:
        """Arguments of `make_spec` that give this value again, as JSON holds them."""
        return {
            "config": dict(self.config),
            "depth": len(self.layers),
            "length": self.served_length,
            "scales": [layer.scales for layer in self.layers],
            "pooling": None if self.pooling is None else asdict(self.pooling),
            "widths": [layer.width for layer in self.layers],
            "formats": [
                [asdict(weight_format), names] for weight_format, names in _names_of(self.formats)
            ],
        }


def make_spec(
    config: Mapping[str, Any],
    depth: int | None = None,
    length: int | None = None,
    scales: Iterable[Iterable[Any] | None] = (),
    pooling: Mapping[str, Any] | None = None,
    widths: Iterable[int | None] | None = None,
    formats: Iterable[tuple[Mapping[str, Any], Iterable[str]]] = (),
) -> ModelSpec:
    """The spec of a configuration.

    Args:
        depth: the number of layers, where the first ones alone are wanted.
        length: tokens of the longest sequence that is served.
        scales: the scales of each layer, see `with_scales`.
        pooling: fields of a `Pooling`.
        widths: the width at which each layer's heads are stored, see `with_widths`.
        formats: fields of a `WeightFormat`, with the names of the weights that have it.

    Raises ConfigError when the configuration cannot work on any number of devices.
    """
    module = family(config.get("model_type", ""))
    read = getattr(module, "read", dict)
    spelling = getattr(module, "SPELLING", {})
    complete = read(config)
    hf = {**module.DEFAULTS, **common_keys(complete, spelling)}
    with named_as_in_file(complete, spelling):
        spec: ModelSpec = replace(module.spec(hf), scheme=weight_scheme(hf))
        for layer in spec.attention_layers:
            spec.heads(1, layer)
    spec = _with_ends(spec)
    if depth is not None:
        spec = spec.first_layers(depth)
    spec = spec.serving(length or spec.context_length).with_scales(scales)
    if widths is not None:
        spec = spec.with_widths(widths)
    kinds = {name: WeightFormat(**fields) for fields, names in formats for name in names}
    spec = replace(spec, formats=kinds)
    if pooling is None:
        return spec
    return replace(spec, pooling=_pooling(pooling))


def _first(reasons: Iterable[str | None]) -> str | None:
    """The first reason that there is."""
    return next(filter(None, reasons), None)


def _with_ends(spec: ModelSpec) -> ModelSpec:
    """The same spec with the ends of sequences that the vocabulary has. Small models keep the ids
    of large ones, which end nothing. Raises ConfigError for an id that is negative."""
    ends = spec.eos_token_ids
    vocab = spec.vocab_size
    if wrong := [token for token in ends if token < 0]:
        raise ConfigError(
            f"eos_token_id {wrong[0]} is not in the vocabulary of {vocab} tokens; "
            "correct config.json or generation_config.json"
        )
    return replace(spec, eos_token_ids=tuple(token for token in ends if token < vocab))


def _names_of(formats: Mapping[str, WeightFormat]) -> list[tuple[WeightFormat, list[str]]]:
    kinds = dict.fromkeys(formats.values())
    return [
        (weight_format, [name for name, entry in formats.items() if entry == weight_format])
        for weight_format in kinds
    ]


def _pooling(fields: Mapping[str, Any]) -> Pooling:
    """The `Pooling` of these fields, as JSON holds them."""
    maps = tuple(DenseMap(**dense) for dense in fields["maps"])
    lists = {name: tuple(fields[name]) for name in ("modes", "dimensions", "labels")}
    lists["token_logits"] = tuple(map(tuple, fields["token_logits"]))
    return Pooling(**{**fields, **lists, "maps": maps})


def read_spec(model_dir: str | Path, wish: Wish | None = None) -> ModelSpec:
    """The spec of a model directory, served as the operator wishes. Raises ConfigError."""
    wish = wish or Wish()
    directory = Path(model_dir)
    hf = read_config(model_dir, wish.overrides)
    spec = replace(make_spec(hf), pooling=read_pooling(directory, hf, wish))
    if beyond := [token for token in eos_token_ids(hf) if token >= spec.vocab_size]:
        logger.warning(
            "eos_token_id %s of config.json or generation_config.json: the vocabulary has %d "
            "tokens, so these end no sequence",
            ", ".join(map(str, sorted(beyond)[:5])),
            spec.vocab_size,
        )
    limit = None
    if spec.pooling is not None:
        limit = length_limit(directory)
    if limit is None:
        return spec
    return replace(spec, context_length=min(limit, spec.context_length))
