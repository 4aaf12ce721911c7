"""What an operator asked for: the configuration, and the model that it names."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from jaxllm import weights
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.runtime.state import MAX_STOP_IDS
from jaxllm.hosts.group import ALONE, Hosts
from jaxllm.locate import find
from jaxllm.models import ModelSpec, Wish, read_spec
from jaxllm.sampling.options import MAX_STOP_TOKEN_IDS

# An encoder caches nothing, so its pages have no bytes; slots are what limits requests
ENCODER_PAGES = 2**14


@dataclass(frozen=True)
class Wishes:
    """What a start begins with, before any device is asked.

    Attributes:
        config: the configuration, for a model of this kind.
        files: the model's, which are open until the start has read its weights.
        spec: the model as these files describe it.
        hosts: that decide together.
    """

    config: EngineConfig
    files: weights.ModelFiles
    spec: ModelSpec
    hosts: Hosts = ALONE

    @property
    def directory(self) -> Path:
        """Of the model's files."""
        return self.files.path

    @property
    def weight_cache(self) -> Path | None:
        """The directory that keeps weights, if one is wanted."""
        wanted = self.config.weight_cache_dir
        if wanted is None:
            return None
        return Path(os.path.expanduser(wanted)).absolute()


def read_wishes(config: EngineConfig, hosts: Hosts = ALONE) -> Wishes:
    """Find the model and read what it is; the caller closes its files. Raises ConfigError when
    they are not those of such a model."""
    located = find(config.model, config.revision, config.download_dir)
    with ExitStack() as stack:
        files = stack.enter_context(weights.ModelFiles(*located))
        spec = read_spec(files.path, Wish.of(config))
        _check_ends(spec)
        if spec.pooling is not None and spec.pooling.bidirectional:
            config = replace(
                config, num_gpu_blocks_override=ENCODER_PAGES, kv_cache_memory_bytes=None
            )
        weights.check_shapes(files, spec, config.load_format)
        stack.pop_all()
    return Wishes(config, files, spec, hosts)


def _check_ends(spec: ModelSpec) -> None:
    """Raise ConfigError when a slot cannot hold the model's end-of-sequence ids beside a request's
    own stop ids."""
    limit = MAX_STOP_IDS - MAX_STOP_TOKEN_IDS
    if len(spec.eos_token_ids) > limit:
        raise ConfigError(
            f"config.json and generation_config.json name {len(spec.eos_token_ids)} "
            f"end-of-sequence ids; at most {limit} are supported"
        )
