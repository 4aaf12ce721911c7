"""Several hosts become one engine: they meet, and JAX joins their devices."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path

import jax

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.connections.key_file import read_key
from jaxllm.hosts.controller import Controller, listen
from jaxllm.hosts.follower import Follower
from jaxllm.hosts.group import ALONE, LOST_STATUS, Alone, GroupError, Place
from jaxllm.locate import locate

# Fields of EngineConfig that each host has for itself
OWN = frozenset(
    {
        *("node_rank", "master_addr", "group_key_file"),
        *("model", "tokenizer", "skip_tokenizer_init", "download_dir"),
        *("compilation_cache_dir", "profiler_dir", "kv_events_config"),
    }
)
# Files whose names and sizes tell checkpoints apart; of those that are read at start the contents
WEIGHTS = (".safetensors", ".gguf")
READ = (".json",)
CONNECT_SECONDS = 300  # for JAX's own connections

logger = logging.getLogger("jaxllm.engine")


@contextmanager
def joined(config: EngineConfig) -> Iterator[Controller | Follower | Alone]:
    """The hosts of an engine, with all their devices. If the block fails, the others learn why.

    Of several hosts none may have opened a device before. From then on one that is lost ends this
    process. Raises ConfigError when the hosts do not fit each other or cannot meet.
    """
    if config.nnodes == 1:
        yield ALONE
        return
    hosts = _join(config, locate(config.model, config.revision, config.download_dir))
    try:
        yield hosts
    except GroupError as error:
        end_process(str(error))
    except Exception as error:
        hosts.close(str(error) or type(error).__name__)
        raise


def _join(config: EngineConfig, model_dir: Path) -> Controller | Follower:
    assert config.group_key_file is not None  # as EngineConfig checks
    key = read_key(config.group_key_file, "--group-key-file")
    place = Place(config.node_rank, config.nnodes, config.master_addr, config.master_port, key)
    facts = facts_of(config, model_dir)
    hosts: Controller | Follower
    if place.rank:
        hosts = Follower(place, facts, end_process)
        hosts.last_as_process()
    else:
        with listen(place.host, place.port + 1):  # nobody else takes it while hosts come
            hosts = Controller(place, facts, end_process)
    try:
        _join_devices(place)
    except RuntimeError as error:
        hosts.close(reason := f"JAX could not join the devices of all hosts: {error}"[:300])
        raise ConfigError(reason) from None
    return hosts


def _join_devices(place: Place) -> None:
    beside = replace(place, port=place.port + 1)
    own = replace(beside, host=str(socket.getaddrinfo(place.host, None)[0][4][0]))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)  # who ends waits for nobody
    jax.distributed.initialize(
        beside.where,
        place.count,
        place.rank,
        cluster_detection_method="deactivate",
        initialization_timeout=CONNECT_SECONDS,
        shutdown_timeout_seconds=5,
        coordinator_bind_address=own.where,  # by default it listens everywhere
    )
    atexit.register(jax.distributed.shutdown)  # before connections close with the interpreter


def end_process(reason: str) -> None:
    """The end of a group that has lost a host: its devices wait for one that never comes."""
    logger.error("%s; the whole group ends and must be started again", reason)
    os._exit(LOST_STATUS)


def facts_of(config: EngineConfig, model_dir: Path) -> dict[str, str]:
    """What must be the same on every host: versions, flags and checkpoint."""
    flags = {
        f"--{field.name.replace('_', '-')}": repr(getattr(config, field.name))
        for field in fields(EngineConfig)
        if field.name not in OWN
    }
    versions = {name: version(name) for name in ("jaxllm", "jax", "jaxlib")}
    return versions | flags | {"the checkpoint": fingerprint(model_dir)}


def fingerprint(model_dir: Path) -> str:
    """Of a checkpoint: the contents of its configuration, and the names and sizes of its
    weights."""
    digest = hashlib.sha256()
    for path in sorted(model_dir.iterdir()):
        if path.suffix in WEIGHTS:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        elif path.suffix in READ and path.is_file():
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
