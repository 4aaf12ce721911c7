"""Limits of a step, the shapes that are compiled within them, and the stages that layers are
divided into."""

from __future__ import annotations

from jaxllm.cache.layer import owner_of
from jaxllm.config import ConfigError, EngineConfig, step_seqs
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Limits
from jaxllm.mesh import Stage, stages
from jaxllm.models import ModelSpec

# Chunk tokens of a batch-invariant engine, which has one extend shape
BATCH_INVARIANT_TOKENS = 512
PRODUCER_TOKENS = 2048  # whose pages travel while the next step runs; the last steps are shorter


def step_limits(config: EngineConfig, spec: ModelSpec, platform: str) -> Limits:
    """Requests and chunk tokens of a step, and the longest sequence. Raises ConfigError."""
    length = model_length(config, spec)
    slots = 256
    usual = 8192
    if platform == "cpu":
        slots = 16
        usual = min(length, 512)
    slots = config.max_num_seqs or slots
    if config.batch_invariant:
        usual = min(usual, BATCH_INVARIANT_TOKENS)
    if (config.kv_transfer_config or {}).get("kv_role") == "kv_producer":
        usual = min(usual, PRODUCER_TOKENS)
    whole = spec.pooling is not None and not spec.pooling.takes_chunks
    if whole:
        usual = max(usual, length)
    tokens = config.max_num_batched_tokens or max(usual, slots)
    if whole and tokens < length:
        raise ConfigError(
            f"--max-num-batched-tokens ({tokens}) must be at least --max-model-len ({length}), "
            "since this model pools all tokens of a prompt and computes it in one step"
        )
    if tokens < slots:
        raise ConfigError(
            f"--max-num-batched-tokens ({tokens}) must be at least --max-num-seqs ({slots}), "
            "since every running request may decode a token"
        )
    return Limits(max_num_seqs=slots, max_num_batched_tokens=tokens, max_model_len=length)


def model_length(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens of the longest sequence that was asked for. Raises ConfigError."""
    limit = spec.context_length
    asked = config.max_model_len
    if asked is None or may_shorten(config):
        return limit
    asked = int(asked)
    if asked < 1:
        raise ConfigError(f"--max-model-len must be at least 1, got {asked}")
    if asked > limit:
        raise ConfigError(
            f"--max-model-len {asked} is longer than the model allows ({limit} tokens); "
            "ask for at most that, or auto"
        )
    return asked


def may_shorten(config: EngineConfig) -> bool:
    """Whether the longest sequence may become shorter to fit memory."""
    return config.max_model_len in ("auto", -1)


def shares_prefixes(config: EngineConfig, spec: ModelSpec, length: int) -> bool:
    """Whether prompts of at most `length` tokens may start from each other's pages. A pool over
    all tokens needs hidden states that no page holds."""
    whole = spec.pooling is not None and not spec.pooling.takes_chunks
    apart = whole or spec.prefix_refusal is not None or spec.keys_vary(length)
    return config.enable_prefix_caching and not apart


def step_buckets(config: EngineConfig, spec: ModelSpec, limits: Limits, platform: str) -> Buckets:
    """The shapes to compile."""
    build = Buckets.build
    if config.batch_invariant:
        build = Buckets.batch_invariant
    elif spec.pooling is not None:
        build = Buckets.pooling
    seqs = step_seqs(limits.max_num_seqs, config.pipeline_parallel_size)
    return build(seqs, limits.max_num_batched_tokens, platform)


def divide(config: EngineConfig, spec: ModelSpec, max_num_seqs: int) -> tuple[Stage, ...]:
    """The stages of an engine, mostly one, which runs `max_num_seqs` requests at once. Raises
    ConfigError."""
    count = config.pipeline_parallel_size
    layers = len(spec.layers)
    if count == 1:
        return stages(1)
    refused = {
        "--kv-transfer-config": config.kv_transfer_config is not None,
        "a pooling model": spec.pooling is not None,
    }
    wanted = [name for name, is_wanted in refused.items() if is_wanted]
    if wanted:
        raise ConfigError(
            f"{wanted[0]} does not go with --pipeline-parallel-size yet; leave out one of them"
        )
    if count > layers:
        raise ConfigError(
            f"--pipeline-parallel-size {count} is more than the {layers} layers of the model; "
            f"set it to at most {layers}"
        )
    if max_num_seqs < count:
        raise ConfigError(
            f"--max-num-seqs {max_num_seqs} leaves stages without requests; set it to at "
            f"least --pipeline-parallel-size ({count})"
        )
    divided = stages(count)
    for stage in divided:
        _check_shared(spec, stage)
    return divided


def _check_shared(spec: ModelSpec, stage: Stage) -> None:
    """Raise ConfigError where a layer of the stage reads keys of a layer before it."""
    layers = stage.layers(len(spec.layers))
    for layer in layers:
        owner = owner_of(spec.layers, layer)
        if owner not in layers:
            raise ConfigError(
                f"--pipeline-parallel-size {stage.count}: layer {layer} would be in another stage "
                f"than layer {owner}, whose keys it reads; choose another number of stages"
            )
