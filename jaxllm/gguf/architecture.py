"""What an architecture of GGUF files is: the same model as Hugging Face's family says it.

Each file of `architectures/` has one, as `ARCHITECTURE`. The keys are those of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, the names of tensors those of
llama.cpp's `constants.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.gguf import architectures
from jaxllm.gguf.file import StoredTensor
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model
from jaxllm.tensors import Deferred

LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)")
_IN = "blk.{}"
_OUT = "model.layers.{}"
# From names in the file to those of checkpoints, without ".weight" and ".bias"; {} is a layer
LLAMA_NAMES: Mapping[str, str | None] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": None,
    f"{_IN}.attn_norm": f"{_OUT}.input_layernorm",
    f"{_IN}.attn_q": f"{_OUT}.self_attn.q_proj",
    f"{_IN}.attn_k": f"{_OUT}.self_attn.k_proj",
    f"{_IN}.attn_v": f"{_OUT}.self_attn.v_proj",
    f"{_IN}.attn_output": f"{_OUT}.self_attn.o_proj",
    f"{_IN}.attn_q_norm": f"{_OUT}.self_attn.q_norm",
    f"{_IN}.attn_k_norm": f"{_OUT}.self_attn.k_norm",
    f"{_IN}.ffn_norm": f"{_OUT}.post_attention_layernorm",
    f"{_IN}.ffn_gate": f"{_OUT}.mlp.gate_proj",
    f"{_IN}.ffn_up": f"{_OUT}.mlp.up_proj",
    f"{_IN}.ffn_down": f"{_OUT}.mlp.down_proj",
    f"{_IN}.attn_rot_embd": None,
}

_MLP = f"{_OUT}.mlp"
EXPERT_NAMES: Mapping[str, str | None] = {
    f"{_IN}.ffn_gate_inp": f"{_MLP}.gate",
    **{f"{_IN}.ffn_{p}_exps": f"{_MLP}.experts.{{}}.{p}_proj" for p in ("gate", "up", "down")},
}
SHARED_NAMES: Mapping[str, str | None] = {
    f"{_IN}.ffn_{p}_shexp": f"{_MLP}.shared_experts.{p}_proj" for p in ("gate", "up", "down")
}
# Of layers that predict further tokens, which no family uses
PREDICTING = "blk.{}.nextn."

type Change = Callable[[Deferred, Metadata], Deferred]


@dataclass(frozen=True)
class Join:
    """A tensor of a checkpoint that the file holds in parts.

    Attributes:
        parts: their names; {} is a layer.
        name: of the whole.
        make: the whole from the parts.
        by_rows: the whole's rows are those of the parts, so the parts of groups are joined alike.
    """

    parts: tuple[str, ...]
    name: str
    make: Callable[..., Deferred]
    by_rows: bool = False


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`.

    Attributes:
        config: the model's config.json.
        names: from names in the file to names of checkpoints, both without ".weight" and ".bias"
            unless the first has it; a second {} numbers the entries of the first axis, each of
            which is a tensor there. None: it is in the configuration already.
        changes: what is done to a tensor, by its name in the file without ".weight" and ".bias"
            unless it has them.
        joins: tensors that are put together.
        turned: names in checkpoints of tensors of experts [E, out, in] that are [E, in, out] there.
        plain: matrices of the file that never stay numbers of few bits.
        added: the tokens of which a file does not say all, as `added_tokens_decoder` of
            tokenizer_config.json.
    """

    config: Callable[[Model], dict[str, Any]]
    names: Mapping[str, str | None]
    changes: Mapping[str, Change] = field(default_factory=dict)
    joins: tuple[Join, ...] = ()
    turned: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    added: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}

    def keeps(self, name: str) -> bool:
        """Whether a matrix of the file is one of the checkpoint, with its rows in some order."""
        changed = {part for join in self.joins for part in join.parts} | set(self.plain)
        return _layer(name)[1] not in changed and name.endswith(".weight")


def known() -> list[str]:
    """The architectures that run, with hyphens for underscores."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(architectures.__path__))


def architecture(metadata: Metadata) -> Architecture:
    """The architecture of a model. Raises ConfigError for an unknown one."""
    name = metadata.architecture
    if name.replace("_", "-") not in known():
        raise ConfigError(
            f"the GGUF architecture {name!r:.80} is not supported (supported: "
            f"{', '.join(known())}); use the model's safetensors"
        )
    module = importlib.import_module(f"{architectures.__name__}.{name.replace('-', '_')}")
    rules: Architecture = module.ARCHITECTURE
    return rules


def checkpoint_tensors(model: Model) -> dict[str, Deferred]:
    """The model's tensors as a checkpoint holds them; unknown ones keep their names. Raises
    ConfigError for an unknown architecture."""
    rules = architecture(model.metadata)
    left = {name: tensor.deferred() for name, tensor in model.tensors.items()}
    tensors = dict(_joined(rules.joins, left)) | _changed(rules, left, model.metadata)
    for name, tensor in tensors.items():
        if name.endswith(rules.turned):
            tensors[name] = tensor.swapaxes(1, 2)
    return tensors


def checkpoint_parts(model: Model) -> dict[str, tuple[str, tuple[Deferred, ...]]]:
    """By their names in a checkpoint, the tensors that are matrices of numbers in groups, or such
    matrices of all experts [E, out, in]: the type of the numbers, and the numbers with their scales
    and offsets. Raises ConfigError for an unknown architecture."""
    rules = architecture(model.metadata)
    matrices = dict(_joined_parts(rules.joins, model.tensors))
    for name, tensor in model.tensors.items():
        if tensor.type.integers is None or len(tensor.shape) < 2 or not rules.keeps(name):
            continue
        changed = [_changed(rules, {name: part}, model.metadata) for part in tensor.parts()]
        for whole in changed[0]:
            matrices[whole] = (tensor.type.integers, tuple(part[whole] for part in changed))
    return matrices


def _joined_parts(
    joins: tuple[Join, ...], tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, tuple[str, tuple[Deferred, ...]]]]:
    """Names, types and parts of the tensors that are put together of several, where the file holds
    all of these and in one type."""
    layers = sorted({_layer(name)[0] for name in tensors})
    for join in (join for join in joins if join.by_rows):
        for layer in layers:
            stored = [tensors[n] for part in join.parts if (n := part.format(layer)) in tensors]
            kinds = {tensor.type.name: tensor.type.integers for tensor in stored}
            integers = next(iter(kinds.values()), None)
            if len(stored) == len(join.parts) and len(kinds) == 1 and integers is not None:
                with _fitting(stored[0].name, *(tensor.deferred() for tensor in stored)):
                    parts = zip(*(tensor.parts() for tensor in stored), strict=True)
                    yield (
                        join.name.format(layer),
                        (integers, tuple(join.make(*pieces) for pieces in parts)),
                    )


def _changed(
    rules: Architecture, tensors: Mapping[str, Deferred], metadata: Metadata
) -> dict[str, Deferred]:
    """Tensors of a file as a checkpoint holds them."""
    changed: dict[str, Deferred] = {}
    for name, tensor in tensors.items():
        layer, inner = _layer(name)
        stem, _, leaf = inner.rpartition(".")
        if change := rules.changes.get(inner) or rules.changes.get(stem):
            with _fitting(name, tensor):
                tensor = change(tensor, metadata)
        changed |= _named(rules.names, name, (layer, inner, stem, leaf), tensor)
    return changed


@contextmanager
def _fitting(name: str, *tensors: Deferred) -> Iterator[None]:
    """Raises ConfigError where a change does not fit the shapes of tensors."""
    try:
        yield
    except ValueError:
        shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ConfigError(
            f"{name:.100} has the shape {shapes}, which the model's heads or experts do not fit; "
            "download the file again"
        ) from None


def _layer(name: str) -> tuple[str, str]:
    """The number of a tensor's layer, "" for none, and its name with {} for that."""
    match = LAYER.fullmatch(name)
    if match is None:
        return ("", name)
    return (match[1], f"blk.{{}}.{match[2]}")


def _named(
    names: Mapping[str, str | None], name: str, parts: tuple[str, str, str, str], tensor: Deferred
) -> dict[str, Deferred]:
    """The tensor under its name in a checkpoint, or its entries under theirs."""
    layer, inner, stem, leaf = parts
    if inner.startswith(PREDICTING):
        return {}
    whole = names.get(inner, "")
    if whole == "" and stem in names:
        whole = None
        if names[stem] is not None:
            whole = f"{names[stem]}.{leaf}"
    if whole is None:
        return {}
    template = (whole or name).replace("{}", layer, 1)
    if "{}" not in template:
        return {template: tensor}
    return {template.format(index): tensor[index] for index in range(tensor.shape[0])}


def _joined(joins: tuple[Join, ...], left: dict[str, Deferred]) -> Iterator[tuple[str, Deferred]]:
    """Tensors put together, whose parts are taken out of `left`."""
    layers = sorted({_layer(name)[0] for name in left})
    for join in joins:
        for layer in layers:
            names = [part.format(layer) for part in join.parts]
            if all(name in left for name in names):
                parts = [left.pop(name) for name in names]
                with _fitting(names[0], *parts):
                    yield join.name.format(layer), join.make(*parts)
