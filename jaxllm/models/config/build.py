"""From a `ModelSpec` to its modules, and to the checkpoint tensors that fill them."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from itertools import count

from flax import nnx
from jax.typing import DTypeLike

from jaxllm.cache.layer import ScaleTensors
from jaxllm.config import ConfigError
from jaxllm.mesh import Stage
from jaxllm.models.config.read import family
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.attention import Attention
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.mixture.experts import ExpertMaps, Tensors
from jaxllm.nn.pooling import PoolingModel
from jaxllm.nn.rules import Piece, Rule

# Names of the scales of a layer's keys and values, within its attention
SPELLINGS = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)


# What older checkpoints hold of RoPE
ROTARY_TABLES = ("inv_freq", "cos_cached", "sin_cached")
# Ends of names in checkpoints of BERT's first years
LAYER_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

type Model = Decoder | PoolingModel


def build(spec: ModelSpec, shards: int, rngs: nnx.Rngs, dtype: DTypeLike) -> Model:
    """The model with fresh parameters, laid out for `shards` tensor shards.

    Raises ConfigError when it does not divide over them.
    """
    init = Init(rngs, dtype)
    model: Decoder = family(spec.model_type).build(spec, shards, init)
    for layer, cache in zip(model.layers, spec.layers, strict=True):
        if cache.scales:
            layer.attention.take_kv_scales()
    if spec.formats:
        if model.embed is not None and (weight_format := spec.formats.get(table_name(spec))):
            model.embed.hold(weight_format, shards)
        if model.head is not None and (weight_format := spec.formats.get(head_name(spec))):
            model.head.hold([weight_format], shards)
        for _, module, names in linear_maps(spec, model):
            module.hold([spec.formats.get(name) for name in names], shards)
        for _, maps, forms in expert_maps(spec, model):
            first = [form.names[0].removesuffix(".weight") for form in forms]
            if weight_format := next((spec.formats[n] for n in first if n in spec.formats), None):
                maps.hold(weight_format)
    if spec.pooling is None:
        return model
    if spec.pooling.bidirectional:
        _check_scores(model)
    return PoolingModel(init, model, spec.pooling)


def _check_scores(model: Decoder) -> None:
    """Raise ConfigError where attention in both directions cannot be that of a layer."""
    for layer in model.layers:
        attention = layer.attention
        if (
            not isinstance(attention, Attention)
            or attention.softcap is not None
            or attention.sinks is not None
        ):
            raise ConfigError(
                "config.json: is_causal is false, which is not supported with latent attention, "
                "soft caps of scores, or sinks"
            )


def linear_maps(spec: ModelSpec, model: Decoder) -> Iterator[tuple[str, Linear, tuple[str, ...]]]:
    """The path of each linear map of the layers, the map, and the names of its tensors without
    ".weight"."""
    names = family(spec.model_type).NAMES
    for path, module, tensors in model.named(names):
        if isinstance(module, Linear) and path.startswith("layers."):
            yield path, module, tensors


def expert_maps(spec: ModelSpec, model: Decoder) -> Iterator[tuple[str, ExpertMaps, list[Tensors]]]:
    """The path of the maps of all experts of a layer, the maps, and their tensors in each form."""
    for path, module, tensors in model.named(family(spec.model_type).NAMES):
        if isinstance(module, ExpertMaps):
            yield path, module, module.forms(*tensors)


def table_name(spec: ModelSpec) -> str:
    """The name of the table of tokens without ".weight"."""
    return str(family(spec.model_type).NAMES["embed"][0])


def head_name(spec: ModelSpec) -> str:
    """The name of the output head without ".weight", tied or not; "" where the family has none."""
    (name,) = family(spec.model_type).NAMES.get("head", ("",))
    return str(name)


def outline(spec: ModelSpec, shards: int, dtype: DTypeLike) -> Model:
    """The same model with ShapeDtypeStructs for arrays: nothing is allocated."""
    return nnx.eval_shape(lambda: build(spec, shards, nnx.Rngs(0), dtype))


def rules(spec: ModelSpec, model: Model) -> list[Rule]:
    """Every parameter of `build` and the checkpoint tensors that fill it."""
    body = model
    path = ""
    if isinstance(model, PoolingModel):
        body = model.body
        path = "body."
    scales = (
        kv_scales_rule(layer, cache.scales, body.layers[layer].attention.heads.kv_stored)
        for layer, cache in enumerate(spec.layers)
        if cache.scales
    )
    first, *others = _forms(spec)
    table = list(model.rules(first))
    for names in others:
        forms = zip(table, model.rules(names), strict=True)
        table = [replace(rule, others=(*rule.others, form.pieces)) for rule, form in forms]
    return [
        *table,
        *(replace(rule, parameter=f"{path}{rule.parameter}") for rule in scales),
    ]


def keep_stage(model: Model, table: list[Rule], stage: Stage) -> list[Rule]:
    """Drop the modules that other stages of a pipeline have; returns the rules of those that stay,
    whose layers are numbered anew."""
    assert isinstance(model, Decoder), "models that pool run in one stage"
    layers = stage.layers(len(model.layers))
    kept = []
    model.keep_stage(stage)
    for rule in table:
        module, _, rest = rule.parameter.partition(".")
        if module != "layers":
            if getattr(model, module) is not None:
                kept.append(rule)
            continue
        number, _, leaf = rest.partition(".")
        if int(number) in layers:
            kept.append(replace(rule, parameter=f"layers.{int(number) - layers.start}.{leaf}"))
    return kept


def read_name(spec: ModelSpec, tensors: Container[str]) -> Callable[[str], str | None]:
    """The function from a checkpoint's name of a tensor to the name in the rules; it gives None for
    a tensor of a part that is not served, such as a vision tower.

    Checkpoints of one family may prefix names differently, see its `PREFIXES`. One of the body
    alone, such as an embedding model's, lacks the body's own prefix.
    """
    prefixes = getattr(family(spec.model_type), "PREFIXES", {})

    def common(name: str) -> str | None:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            return name
        common_prefix = prefixes[prefix]
        if common_prefix is None:
            return None
        return common_prefix + name.removeprefix(prefix)

    names = family(spec.model_type).NAMES
    body, _, embed = names["embed"][0].partition(".")
    bare = f"{embed}.weight" in tensors
    if spec.pooling is not None:
        maps = spec.pooling.maps
    else:
        maps = ()
    heads = [*names.get("head", ()), *(name for dense in maps for name in (dense.name, dense.norm))]
    behind = {f"{module}.{leaf}" for module in heads for leaf in ("weight", "bias")}

    def read(name: str) -> str | None:
        for old, new in LAYER_NORMS.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if not bare:
            return common(name)
        if name in behind:
            return name
        return f"{body}.{name}"

    return read


def spellings(spec: ModelSpec) -> Callable[[str], tuple[str, ...]]:
    """The function from a tensor's name in the rules to that name and all others that checkpoints
    of the family have for it. Settings may use another name for a module than the files do:
    transformers renames the modules of wrappers when it reads and writes them."""
    prefixes = getattr(family(spec.model_type), "PREFIXES", {})
    served = [(outer, inner) for outer, inner in prefixes.items() if inner is not None]

    def spelled(name: str) -> tuple[str, ...]:
        others = (o + name.removeprefix(inner) for o, inner in served if name.startswith(inner))
        return (name, *others)

    return spelled


def folders(spec: ModelSpec) -> list[str]:
    """Folders beside the checkpoint that hold further tensors, which the rules call by
    `folder/name`."""
    if spec.pooling is not None:
        maps = spec.pooling.maps
    else:
        maps = ()
    return [dense.name.partition("/")[0] for dense in maps if "/" in dense.name]


def held_layers(spec: ModelSpec, tensors: Container[str]) -> int:
    """The number of layers that a checkpoint with these tensors holds."""
    spellings = (name for form in _forms(spec) for several in form.values() for name in several)
    names = [f"{name}.weight" for name in spellings if name.count("{}") == 1]
    # Layers may differ, so one of the names is enough
    return next(i for i in count() if not any(name.format(i) in tensors for name in names))


def _forms(spec: ModelSpec) -> tuple[Mapping[str, tuple[str, ...]], ...]:
    """The family's names in each of their forms."""
    module = family(spec.model_type)
    return (module.NAMES, *getattr(module, "OTHER_NAMES", ()))


def ignored(spec: ModelSpec) -> dict[str, str | None]:
    """Tensors that a checkpoint may hold and that no parameter needs, each with the tensor that it
    must equal (None: any values).

    These are the rotary tables of older checkpoints, the scales of 8-bit queries, keys and values,
    the head of a tied model, which equals the embedding, and heads that a pooling model leaves out.
    """
    body = table_name(spec).rpartition(".")[0]
    tensors: dict[str, str | None] = {f"{body}.rotary_emb.inv_freq": None}
    listed = getattr(family(spec.model_type), "IGNORED", ())
    for layer in range(len(spec.layers)):
        prefix = attention_name(spec, layer)
        tensors |= {f"{prefix}.rotary_emb.{table}": None for table in ROTARY_TABLES}
        tensors[f"{prefix}.q_scale"] = None
        tensors |= dict.fromkeys(name for pair in kv_scale_names(spec, layer) for name in pair)
        tensors |= dict.fromkeys(name.format(layer) for name in listed)
    if spec.pooling is not None:
        if not spec.pooling.token_logits:
            unused = family(spec.model_type).NAMES.get("head", ())
        else:
            unused = ()
        for name in (*unused, "score"):
            tensors |= {f"{name}.{leaf}": None for leaf in ("weight", "bias")}
    if spec.tied and spec.has_head:
        for names in _forms(spec):
            (head,) = names["head"]
            (embed,) = names["embed"]
            tensors[f"{head}.weight"] = f"{embed}.weight"
    return tensors


def unused_prefixes(spec: ModelSpec) -> tuple[str, ...]:
    """The prefixes of names of tensors that the family knows and does not use, such as those of
    layers that predict further tokens."""
    prefixes: Callable[[ModelSpec], tuple[str, ...]] | None
    prefixes = getattr(family(spec.model_type), "unused", None)
    if prefixes is None:
        return ()
    return prefixes(spec)


def attention_name(spec: ModelSpec, layer: int) -> str:
    """What the family's checkpoints call the attention of a layer."""
    (out,) = family(spec.model_type).NAMES["layers.{}.attention.out"]
    return str(out).rpartition(".")[0].format(layer)


def kv_scale_names(spec: ModelSpec, layer: int) -> list[tuple[str, str]]:
    """The names that a checkpoint may give to the scales of a layer's keys and values, the
    likeliest pair first."""
    prefix = attention_name(spec, layer)
    return [(f"{prefix}.{key}", f"{prefix}.{value}") for key, value in SPELLINGS]


def kv_scales_rule(layer: int, tensors: ScaleTensors, heads: int) -> Rule:
    """The rule of the parameter `[K, 2]` with a layer's scales, for `heads` stored KV heads.

    A tensor holds one number for all heads, or one for each of the model's own heads.
    """
    sizes = [math.prod(shape) for _, shape in tensors]
    pieces = (
        Piece(name, shape, (size, 1), side, heads // size)
        for side, ((name, shape), size) in enumerate(zip(tensors, sizes, strict=True))
    )
    return Rule(f"layers.{layer}.attention.kv_scales", tuple(pieces))
