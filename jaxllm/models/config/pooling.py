"""Whether a model directory is served as a pooling model, and how it pools. Imports no jax.

A directory of sentence-transformers says so in `modules.json`
(https://sbert.net/docs/package_reference/sentence_transformer/models.html); other checkpoints by
the name of their architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.locate import read_json
from jaxllm.models.config.pooler import as_wished
from jaxllm.models.config.read import Config, common_keys, family, flag, is_causal, positive
from jaxllm.models.config.sentence_transformers import (
    SETTINGS,
    dense_map,
    modes_of,
    modules_of,
    prompts_of,
)
from jaxllm.pooling import ALL, DenseMap, Pooling

LOGIT_SCORE = "1_LogitScore/config.json"
CLASSIFIER = "ForSequenceClassification"
TOKEN_CLASSIFIER = "ForTokenClassification"
# Ends of architectures' names that are made for pooling
POOLING_ARCHITECTURES = (CLASSIFIER, TOKEN_CLASSIFIER, "Model", "ForTextEncoding")
MAX_LABELS = 2**16

_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "Sigmoid": "sigmoid"}


@dataclass(frozen=True)
class Wish:
    """How the operator wants a model to be served: `--runner`, `--convert`, `--hf-overrides`,
    `--pooler-config`."""

    runner: str = "auto"
    convert: str = "auto"
    overrides: Mapping[str, Any] | None = None
    pooler: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> Wish:
        """What the engine's configuration says."""
        return cls(config.runner, config.convert, config.hf_overrides, config.pooler_config)


def read_pooling(model_dir: Path, hf: Config, wish: Wish) -> Pooling | None:
    """How the model pools; None when it generates. Raises ConfigError."""
    module = family(str(hf.get("model_type")))
    encodes = getattr(module, "ENCODES", False)
    spelling = getattr(module, "SPELLING", {})
    inner = hf
    if not encodes:
        inner = getattr(module, "read", dict)(hf)
    hf = {**common_keys(inner, spelling), **common_keys(hf, spelling)}
    if encodes:
        pooling: Pooling | None = _encoder(model_dir, hf, wish)
    else:
        pooling = _decoder(model_dir, hf, wish)
    if not wish.pooler:
        return pooling
    if pooling is None:
        raise ConfigError(
            "--pooler-config is for pooling models, and this one generates; leave it out, or set "
            "--runner pooling"
        )
    return as_wished(pooling, wish.pooler, positive(hf, "hidden_size"))


def _decoder(model_dir: Path, hf: Config, wish: Wish) -> Pooling | None:
    """The pooling of a decoder, None where it generates."""
    if is_causal(hf):
        return _causal(model_dir, hf, wish)
    if wish.runner == "generate":
        raise ConfigError(
            f"config.json: tokens of this {hf['model_type']} see those behind them, so it cannot "
            "generate; use --runner pooling or auto"
        )
    pooling = _causal(model_dir, hf, replace(wish, runner="pooling"))
    return pooling and replace(pooling, bidirectional=True)


def _causal(model_dir: Path, hf: Config, wish: Wish) -> Pooling | None:
    module = family(str(hf.get("model_type")))
    name = architecture(hf)
    if wish.runner != "generate":
        tokens = _score_tokens(model_dir, hf)
    else:
        tokens = ()
    if tokens and wish.convert in ("auto", "none", "classify"):
        return _token_classifier(model_dir, hf, tokens)
    modules = modules_of(model_dir)
    classifies = name.endswith((CLASSIFIER, TOKEN_CLASSIFIER))
    if wish.runner == "auto":
        wanted = wish.convert in ("embed", "classify")
        named = name.endswith(POOLING_ARCHITECTURES) and name not in getattr(
            module, "GENERATES", ()
        )
        if not (wanted or modules or named):
            return None
    if wish.runner == "generate":
        if classifies:
            raise ConfigError(
                f"config.json: {name} has labels and no output head, so it cannot generate; "
                "use --runner pooling or auto"
            )
        return None
    if wish.convert in ("auto", "none") and classifies:
        task = "classify"
    else:
        task = wish.convert
    if task == "classify":
        return _classifier(model_dir, hf, classifies)
    return _embedder(model_dir, hf, modules)


def architecture(hf: Config) -> str:
    """The first of `architectures`, "" where there is none."""
    names = hf.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return ""


def _encoder(model_dir: Path, hf: Config, wish: Wish) -> Pooling:
    """The pooling of an encoder, which can do nothing else."""
    if wish.runner == "generate":
        raise ConfigError(
            f"config.json: {hf['model_type']} is an encoder, which cannot generate; "
            "use --runner pooling or auto"
        )
    module = family(hf["model_type"])
    modules = modules_of(model_dir)
    classifies = architecture(hf).endswith((CLASSIFIER, TOKEN_CLASSIFIER))
    if wish.convert == "embed" or not (classifies or wish.convert == "classify"):
        return replace(_embedder(model_dir, hf, modules, "cls"), bidirectional=True)
    if not classifies:
        raise ConfigError(f"config.json: {architecture(hf) or 'the model'} has no labels")
    hf = {**module.DEFAULTS, **hf}
    labels = _labels(hf)
    if architecture(hf).endswith(TOKEN_CLASSIFIER):
        maps = (_linear_head(hf, labels, "classifier"),)
        if hasattr(module, "token_classifier"):
            maps = module.token_classifier(hf, len(labels))
        return replace(_of_tokens(model_dir, hf, labels, maps), bidirectional=True)
    mode, maps = module.classifier(hf, len(labels))
    return Pooling(
        task="classify",
        modes=(mode,),
        maps=maps,
        size=len(labels),
        labels=labels,
        activation=_label_activation(model_dir, hf, len(labels)),
        bidirectional=True,
    )


def _embedder(
    model_dir: Path, hf: Config, modules: list[tuple[str, str]], usual: str = "last"
) -> Pooling:
    """The pool, the dense maps and the norm of sentence-transformers; without them the `usual`
    pool, normalised."""
    folders = dict(modules)
    width = positive(hf, "hidden_size")
    if "Pooling" in folders:
        modes = modes_of(model_dir / folders["Pooling"])
    else:
        modes = (usual,)
    size = width * len(modes)
    maps = []
    for name, folder in modules:
        if name == "Dense":
            maps.append(dense_map(model_dir, folder, size))
            size = maps[-1].outputs
    cuts = _dimensions(hf, size)
    return Pooling(
        task="embed",
        modes=modes,
        maps=tuple(maps),
        size=size,
        normalises=not modules or "Normalize" in folders,
        is_matryoshka=flag(hf, "is_matryoshka") or bool(cuts),
        dimensions=cuts,
        prompts=prompts_of(model_dir, hf),
    )


def _dimensions(hf: Config, size: int) -> tuple[int, ...]:
    """`matryoshka_dimensions`, empty where the configuration has none."""
    sizes = hf.get("matryoshka_dimensions")
    if sizes is None:
        return ()
    if not isinstance(sizes, list) or any(type(n) is not int or not 0 < n <= size for n in sizes):
        raise ConfigError(
            f"config.json: matryoshka_dimensions must list numbers from 1 to {size}, "
            f"got {sizes!r:.80}"
        )
    return tuple(sorted(sizes))


def _score_tokens(model_dir: Path, hf: Config) -> tuple[tuple[int, int | None], ...]:
    """The tokens whose logits are scores, as `Pooling.token_logits` has them; empty where none are.

    `classifier_from_token` is vLLM's name for the texts of such tokens, `1_LogitScore` the module
    of sentence-transformers.
    """
    texts = hf.get("classifier_from_token")
    if texts is not None:
        return _named_tokens(model_dir, hf, texts)
    path = model_dir / LOGIT_SCORE
    if not path.is_file():
        return ()
    ids = read_json(path)
    first = ids.get("true_token_id")
    second = ids.get("false_token_id")
    vocab = positive(hf, "vocab_size")
    legal = (type(token) is int and 0 <= token < vocab for token in (first, second or 0))
    if type(first) is not int or not all(legal):
        raise ConfigError(
            f"{path}: true_token_id and false_token_id must be ids below {vocab}, "
            f"got {first!r:.40} and {second!r:.40}"
        )
    return ((first, second),)


def _named_tokens(model_dir: Path, hf: Config, texts: Any) -> tuple[tuple[int, int | None], ...]:
    """The tokens of `classifier_from_token`: one a label, or with `is_original_qwen3_reranker` the
    second against the first."""
    path = model_dir / "tokenizer.json"
    if not isinstance(texts, list) or not texts or not path.is_file():
        raise ConfigError(
            "classifier_from_token must list texts of tokens, and needs the model's tokenizer.json"
        )
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(path))
    ids = list[int]()
    for text in texts:
        token = vocabulary.token_to_id(str(text))
        if token is None:
            raise ConfigError(f"classifier_from_token names {text!r:.80}, which is no token")
        ids.append(token)
    if flag(hf, "is_original_qwen3_reranker"):
        if len(ids) != 2:
            raise ConfigError("is_original_qwen3_reranker needs two tokens, such as no and yes")
        return ((ids[1], ids[0]),)
    return tuple((token, None) for token in ids)


def _token_classifier(
    model_dir: Path, hf: Config, tokens: tuple[tuple[int, int | None], ...]
) -> Pooling:
    """Logits of single tokens after the last one."""
    count = len(tokens)
    return Pooling(
        task="classify",
        modes=("last",),
        maps=(),
        token_logits=tokens,
        size=count,
        labels=tuple(f"LABEL_{index}" for index in range(count)),
        activation=_label_activation(model_dir, hf, count),
    )


def _classifier(model_dir: Path, hf: Config, has_head: bool) -> Pooling:
    """A head `score` on the last token."""
    if not has_head:
        raise ConfigError(
            f"config.json: {architecture(hf) or 'the model'} has no labels; --convert classify "
            f"needs a checkpoint that is …{CLASSIFIER}, or classifier_from_token in --hf-overrides"
        )
    labels = _labels(hf)
    if architecture(hf).endswith(TOKEN_CLASSIFIER):
        name = getattr(family(hf["model_type"]), "TOKEN_HEAD", "score")
        return _of_tokens(model_dir, hf, labels, (_linear_head(hf, labels, name),))
    head = _linear_head(hf, labels, "score")
    return Pooling(
        task="classify",
        modes=("last",),
        maps=(replace(head, bias=False),),
        size=len(labels),
        labels=labels,
        activation=_label_activation(model_dir, hf, len(labels)),
    )


def _linear_head(hf: Config, labels: tuple[str, ...], name: str) -> DenseMap:
    """Hidden states to a number for each label."""
    return DenseMap(name=name, inputs=positive(hf, "hidden_size"), outputs=len(labels), bias=True)


def _of_tokens(
    model_dir: Path, hf: Config, labels: tuple[str, ...], maps: tuple[DenseMap, ...]
) -> Pooling:
    """A head on every token."""
    return Pooling(
        task="token_classify",
        modes=(ALL,),
        maps=maps,
        size=len(labels),
        labels=labels,
        activation=_label_activation(model_dir, hf, len(labels)),
    )


def _labels(hf: Config) -> tuple[str, ...]:
    """Names of the classes in order: `id2label`, else `num_labels` of transformers' names."""
    labels = hf.get("id2label")
    if labels is None:
        count = positive({"num_labels": 2} | dict(hf), "num_labels")
        labels = {str(index): f"LABEL_{index}" for index in range(min(count, MAX_LABELS + 1))}
    if not isinstance(labels, Mapping) or not 1 <= len(labels) <= MAX_LABELS:
        raise ConfigError(f"config.json: id2label must name 1 to {MAX_LABELS} labels")
    names = {str(key): str(name) for key, name in labels.items()}
    if sorted(names) != sorted(map(str, range(len(names)))):
        raise ConfigError("config.json: id2label must have the keys 0, 1, 2 …")
    return tuple(names[str(index)] for index in range(len(names)))


def _label_activation(model_dir: Path, hf: Config, count: int) -> str:
    """What makes scores of labels' logits: as cross-encoders say, else by the kind of problem."""
    nested = hf.get("sentence_transformers")
    path = model_dir / SETTINGS
    settings: Mapping[str, Any] = {}
    if path.is_file():
        settings = read_json(path)
    elif isinstance(nested, Mapping):
        settings = nested
    name = settings.get("activation_fn") or hf.get("sbert_ce_default_activation_function")
    if name is not None:
        short = str(name).rpartition(".")[2]
        if short not in _ACTIVATIONS:
            raise ConfigError(
                f"config.json: the activation {short!r:.80} is not one of {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[short]
    problem: Any = hf.get("problem_type")
    if problem == "regression":
        return "identity"
    if count == 1 or problem == "multi_label_classification":
        return "sigmoid"
    return "softmax"
