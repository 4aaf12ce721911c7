"""The parser of the command line: every field of EngineConfig under its own name, and the server's
own flags, by groups."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any

from jaxllm.config import (
    ATTENTION_BACKENDS,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    LOGPROBS_MODES,
    NEUTRAL_ARGUMENTS,
    PREEMPTION_MODES,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from jaxllm.pooling import CONVERTS, RUNNERS
from jaxllm.server.command_line.accepted import ACCEPTED, Accepted
from jaxllm.server.command_line.server_flags import (
    SERVER_FLAGS,
    integer,
    json_object,
    length,
    real,
)

# Flags of EngineConfig's fields by group: field -> help. The dataclass has types and defaults.
ENGINE_FLAGS: dict[str, dict[str, str]] = {
    "Model": {
        "model": "a local Hugging Face directory, a .gguf file, a hub id (owner/name), or demo, "
        "the built-in model",
        "tokenizer": "directory or hub id of the tokenizer, if not the model's own",
        "skip_tokenizer_init": "run without a tokenizer: token ids in, token ids out",
        "runner": "generate or pooling; auto: what the checkpoint is made for",
        "convert": "what a pooling model gives: embed, classify; auto: what the checkpoint says",
        "pooler_config": "JSON object: task (embed, classify, token_embed, token_classify) or "
        "pooling_type (CLS, LAST, MEAN, ALL) in place of the checkpoint's",
        "hf_overrides": "JSON object: other values for keys of config.json",
        "revision": "branch, tag or commit of a hub model",
        "download_dir": "directory for downloaded hub models",
        "load_format": "auto and safetensors read the checkpoint; dummy makes random weights",
        "dtype": "type of weights and activations; auto: float32 on CPU, else the checkpoint's, "
        "with bfloat16 in place of float32",
        "max_model_len": "longest sequence in tokens: a number, 32k, or auto for the longest "
        "that fits",
        "seed": "seed of requests without one, and of dummy weights",
        "max_logprobs": "log-probabilities per token that a request may ask for; -1: all of them",
        "logprobs_mode": "log-probabilities or logits, of the model (raw) or after all sampling "
        "options (processed)",
        "enforce_eager": "compile programs on first use instead of at start",
        "compilation_cache_dir": "directory that keeps compiled programs between starts",
        "weight_cache_dir": "directory that keeps weights in few bits as devices hold them, so "
        "that the next start reads these alone",
        "attention_backend": "implementation of attention; by default the device's fastest that "
        "supports the model",
    },
    "Memory": {
        "gpu_memory_utilization": "fraction of device memory for weights, workspace and KV pages",
        "kv_cache_memory_bytes": "size of the KV pool in bytes, instead of the fraction",
        "num_gpu_blocks_override": "number of KV pages, instead of the fraction; in models with "
        "sliding windows, of the layers without one",
        "block_size": "tokens per KV page",
        "quantization": "fp8, int8 or int4 (fp8_w8a16 and int8_w8a16 leave inputs as they "
        "are): round the weights while they are loaded; or the method of a quantised checkpoint",
        "kv_cache_dtype": "type of KV pages; fp8 (= fp8_e4m3) and fp8_e5m2 take half the memory; "
        "auto follows the checkpoint",
        "kv_offloading_size": "GiB of host memory for cached prefixes that do not fit the KV pool",
        "kv_events_config": "JSON object with vLLM's keys (enable_kv_cache_events, endpoint, "
        "replay_endpoint, topic …): publish what the prefix cache holds over ZeroMQ",
        "enable_sleep_mode": "an engine that sleeps returns its GPU memory to the driver, for "
        "other processes",
        "kv_transfer_config": "JSON object with vLLM's keys (kv_role, kv_ip, kv_port "
        "…): exchange KV pages with engines that compute prompts or continue them",
        "enable_prefix_caching": "share the KV pages of equal beginnings of prompts",
    },
    "Scheduler": {
        "max_num_seqs": "sequences that run at once, at most",
        "max_num_batched_tokens": "tokens in one step, at most",
        "max_num_queued_reqs": "requests that wait, at most; further ones get 503",
        "max_stall_ms": "time that running streams may wait for a chunk of a prompt, in "
        "milliseconds",
        "scheduling_policy": "fcfs: first come, first served; priority: a request's priority is "
        "a bounded head start",
        "preemption_mode": "recompute preempted sequences, or swap their pages to host memory "
        "and back",
        "swap_space": "GiB of host memory per device for --preemption-mode swap (default: 4)",
        "scheduler_cls": "module:Class of a scheduler, a subclass of "
        "jaxllm.engine.scheduler:Scheduler",
        "batch_invariant": "the same tokens for a request in any batch, also on accelerators "
        "(slower; docs/sampling.md)",
        "async_scheduling": "plan the next step while the device runs the current one",
    },
    "Profiling": {
        "profiler_dir": "directory of JAX's traces; opens POST /start_profile and /stop_profile",
    },
    "Parallel": {
        "tensor_parallel_size": "devices over which every layer is split, of all hosts together; "
        "with stages, those of one stage",
        "expert_parallel_size": "groups of these devices that have experts of their own; within a "
        "group each has a share of every expert (default: as few as kernels take)",
        "enable_expert_parallel": "every device is such a group: experts are whole",
        "pipeline_parallel_size": "stages of layers, each on --tensor-parallel-size devices of its "
        "own, which work on groups of requests in turn; of several hosts each has as many stages",
        "nnodes": "hosts that run the model together, each started with the same options; also "
        "from LWS_GROUP_SIZE",
        "node_rank": "number of this host; 0 serves HTTP, the others follow it; also from "
        "LWS_WORKER_INDEX",
        "master_addr": "address of the host with --node-rank 0; also from LWS_LEADER_ADDRESS",
        "master_port": "port at which that host meets the others; it takes the next one, too",
        "group_key_file": "file with a key of 16 bytes or more that every host has and nobody else",
    },
}
ALIASES = {
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "tensor_parallel_size": ("-tp",),
    "enable_expert_parallel": ("-ep",),
    "expert_parallel_size": ("--ep-size",),
    "pipeline_parallel_size": ("-pp",),
    "quantization": ("-q",),
    "enforce_eager": ("--skip-precompile",),
    "nnodes": ("-n",),
    "node_rank": ("-r",),
}
ACCEPTED_TITLE = "Accepted for scripts written for other servers"
OWN_FLAGS = {"disable_log_stats", "data_parallel_size"}  # NEUTRAL_ARGUMENTS that the server uses
NEUTRAL_REASONS = {
    "trust_remote_code": ": code from a repository is never run",
    "enable_chunked_prefill": ": it is always on",
}
# For streams; offline, whole prompts are faster
SERVER_DEFAULTS = {"max_stall_ms": 200.0}
CHOICES = {
    "dtype": DTYPES,
    "load_format": LOAD_FORMATS,
    "attention_backend": ATTENTION_BACKENDS,
    "kv_cache_dtype": tuple(KV_CACHE_DTYPES),
    "scheduling_policy": SCHEDULING_POLICIES,
    "logprobs_mode": LOGPROBS_MODES,
    "preemption_mode": PREEMPTION_MODES,
    "runner": RUNNERS,
    "convert": CONVERTS,
}


class Help(argparse.HelpFormatter):
    """Shows defaults other than none, false and empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = (
            action.default is None
            or action.default is False
            or action.default in ([], {}, "", argparse.SUPPRESS)
        )
        if hidden:
            return action.help
        return f"{action.help} (default: %(default)s)"


def parser(prog: str = "python -m jaxllm.server") -> argparse.ArgumentParser:
    """The parser of all flags, in groups."""
    top = argparse.ArgumentParser(
        prog=prog,
        description="Serve a Hugging Face model over the OpenAI protocol.",
        formatter_class=Help,
        usage="%(prog)s [MODEL] [options]",
        epilog="--help shows the groups; --help=sampling the sampling options of requests.",
        allow_abbrev=False,
        add_help=False,  # `options.parse` answers --help
    )
    hints = typing.get_type_hints(EngineConfig)
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)} | SERVER_DEFAULTS
    for title, flags in ENGINE_FLAGS.items():
        group = top.add_argument_group(title)
        for name, help in flags.items():
            _engine_flag(group, name, hints[name], defaults[name], help)
    for title, options in SERVER_FLAGS.items():
        group = top.add_argument_group(title)
        for names, arguments in options.items():
            group.add_argument(*names, **arguments)
    _accepted_flags(top.add_argument_group(ACCEPTED_TITLE))
    return top


def _engine_flag(group: Any, name: str, hint: Any, default: Any, help: str) -> None:
    flags = ("--" + name.replace("_", "-"), *ALIASES.get(name, ()))
    if hint is bool:
        group.add_argument(
            *flags, dest=name, action=argparse.BooleanOptionalAction, default=default, help=help
        )
        return
    kinds = set(typing.get_args(hint) or (hint,)) - {type(None)}
    if kinds == {int, str}:
        value_type: Any = length
    else:
        (plain_type,) = kinds
        value_type = {int: integer, float: real, str: str}.get(plain_type, json_object)
    group.add_argument(
        *flags,
        dest=name,
        type=value_type,
        default=default,
        choices=CHOICES.get(name),
        help=help,
        metavar=None,
    )


def _accepted_flags(group: Any) -> None:
    """The flags of NEUTRAL_ARGUMENTS; `options._check_neutral_flag` refuses other values."""
    for name, neutral in NEUTRAL_ARGUMENTS.items():
        if name in OWN_FLAGS:
            continue
        flags = ("--" + name.replace("_", "-"), *ALIASES.get(name, ()))
        accepted = [value for value in neutral if value is not None]
        if any(isinstance(value, bool) for value in accepted):
            help = "no effect" + NEUTRAL_REASONS.get(name, "")
            group.add_argument(
                *flags, action=argparse.BooleanOptionalAction, default=None, help=help
            )
        else:
            help = "not supported yet"
            if accepted:
                help = f"no effect: {' or '.join(map(str, accepted))} is accepted"
            group.add_argument(*flags, default=None, help=help)
    for name, flag in ACCEPTED.items():
        _accepted_flag(group, name, flag)


def _accepted_flag(group: Any, name: str, accepted: Accepted) -> None:
    flags = (f"--{name}", *accepted.aliases)
    if accepted.switch:
        group.add_argument(
            *flags, action=argparse.BooleanOptionalAction, default=None, help=accepted.help
        )
    else:
        group.add_argument(*flags, nargs="*", default=None, metavar="VALUE", help=accepted.help)
