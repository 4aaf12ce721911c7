"""What the user wishes (`EngineConfig`) and what was decided (`Resolved`). Imports no jax."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from jaxllm.pooling import CONVERTS, RUNNERS, Pooling
from pallas_kernels.target import PORTABLE, Target

DTYPES = ("auto", "float16", "half", "bfloat16", "float32", "float")
PAGE_SIZES = (8, 16, 32, 64, 128)  # tokens
LOAD_FORMATS = ("auto", "safetensors", "dummy")
KV_CACHE_DTYPES = {
    "auto": None,  # as the checkpoint's configuration says, else the model's dtype
    "bfloat16": "bfloat16",  # these three must equal the model's dtype
    "float16": "float16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
PREEMPTION_MODES = ("recompute", "swap")
SCHEDULING_POLICIES = ("fcfs", "priority")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
ATTENTION_BACKENDS = ("mosaic_gpu", "mosaic_tpu", "xla", "reference")


class ConfigError(ValueError):
    """The configuration cannot work. The message is one line: what, the limit, the remedy."""


SWAP_SPACE = 4.0  # GiB

# vLLM's arguments that scripts pass and that change nothing here, with their neutral values
NEUTRAL_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    # Remote code is never run; a model that needs it is refused
    "trust_remote_code": (None, False, True),
    "tokenizer_mode": (None, "auto"),
    "enable_chunked_prefill": (None, True),
    "data_parallel_size": (None, 1),
    "disable_log_stats": (None, False, True),
    "cpu_offload_gb": (None, 0),
    "guided_decoding_backend": (None, "auto", "guidance"),  # there is one: llguidance
    "prefix_caching_hash_algo": (None, "sha256", "sha256_cbor"),
}

REMEDIES = {
    "cpu_offload_gb": "; quantization makes weights smaller",
    "guided_decoding_backend": "; grammars are llguidance's",
    "data_parallel_size": "; a server runs several engines: jaxllm serve --data-parallel-size",
}


def check_neutral(argument: str, value: Any, shown: str) -> None:
    """Raises ConfigError when an argument of NEUTRAL_ARGUMENTS has another value than those.

    `shown` is the argument as the user wrote it.
    """
    neutral = NEUTRAL_ARGUMENTS[argument]
    if value not in neutral:
        allowed = ", ".join(str(x) for x in neutral if x is not None)
        accepted = f" (accepted: {allowed})" if allowed else ""
        raise ConfigError(
            f"{shown} is not supported yet; leave it out{accepted}{REMEDIES.get(argument, '')}"
        )


def human_int(text: str) -> int:
    """4096, 32k = 32,000, 32K = 32,768, 1.5m, 2G = 2GiB. Raises ConfigError."""
    plain = re.sub(r"(?<=\d)\s*([KMGT])iB$", r"\1", text.strip().replace(",", "").replace("_", ""))
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", plain)
    if match is None or len(text) > 64:
        raise ConfigError(f"{text!r:.80} is no number (write 8192, 32k, 32K or 32KiB)")
    number, unit = match.groups()
    # Small letters are powers of a thousand, large ones of 1,024
    scale = (10**3 if unit.islower() else 2**10) ** " kmgt".index(unit.lower() or " ")
    if "." in number:
        value = float(number) * scale
    else:
        value = int(number) * scale
    if value != int(value):
        raise ConfigError(f"{text!r} is no whole number")
    return int(value)


def number(text: str) -> float:
    """0.5, 4. Raises ConfigError."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r:.80} is no number (write 4 or 0.5, without a unit)") from None


def token_count(value: Any) -> int | str | None:
    """A maximum length as the user gave it: None, "auto", an integer, or a text for `human_int`.

    Raises ConfigError.
    """
    if value is None or type(value) is int:
        return value
    if not isinstance(value, str):
        raise ConfigError(f'{value!r:.80} is no number of tokens (write 8192, "32k" or "auto")')
    if value.strip().lower() == "auto":
        return "auto"
    return human_int(value)


type Legal = tuple[str, Callable[[Any], bool]]  # what a value must be, and whether it is


def _whole(low: int, high: int) -> Legal:
    return (
        f"a whole number from {low} to {high}",
        lambda value: value is None or (type(value) is int and low <= value <= high),
    )


def _number(text: str, legal: Callable[[float], bool]) -> Legal:
    return (
        text,
        lambda value: (
            isinstance(value, (int, float)) and not isinstance(value, bool) and legal(value)
        ),
    )


def _one_of(allowed: tuple[str, ...]) -> Legal:
    return f"one of {', '.join(allowed)}", lambda value: value in allowed


_HOST_SIZE = _number(f"a number of GiB from 0 to {2**20}", lambda size: 0 <= size <= 2**20)
# Legal on any machine; whether a value fits this one is decided at start
LEGAL: dict[str, Legal] = {
    "seed": _whole(0, 2**63 - 1),
    "kv_cache_memory_bytes": _whole(1, 2**60),
    "num_gpu_blocks_override": _whole(1, 2**31 - 2),
    "max_num_seqs": _whole(1, 2**20),
    "max_num_batched_tokens": _whole(1, 2**30),
    "tensor_parallel_size": _whole(1, 2**20),
    "expert_parallel_size": _whole(1, 2**20),
    "pipeline_parallel_size": _whole(1, 2**10),
    "nnodes": _whole(1, 2**16),
    "node_rank": _whole(0, 2**16 - 1),
    "master_port": _whole(1, 65534),
    "max_logprobs": _whole(-1, 2**20),
    "max_num_queued_reqs": _whole(1, 2**30),
    "block_size": (
        f"one of {', '.join(map(str, PAGE_SIZES))}",
        lambda size: type(size) is int and size in PAGE_SIZES,
    ),
    "gpu_memory_utilization": _number("above 0 and at most 1", lambda share: 0 < share <= 1),
    "scheduling_policy": _one_of(SCHEDULING_POLICIES),
    "logprobs_mode": _one_of(LOGPROBS_MODES),
    "preemption_mode": _one_of(PREEMPTION_MODES),
    "kv_cache_dtype": _one_of(tuple(KV_CACHE_DTYPES)),
    "runner": _one_of(RUNNERS),
    "convert": _one_of(CONVERTS),
    "swap_space": _HOST_SIZE,
    "kv_offloading_size": _HOST_SIZE,
    "max_stall_ms": _number("milliseconds above 0 and below 1000000", lambda ms: 0 < ms < 1e6),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The user's wishes; names follow vLLM's engine arguments, None leaves the choice to the start.

    Raises ConfigError for a value that can never work.
    """

    model: str = "demo"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    # One of RUNNERS; "auto": what the checkpoint is made for
    runner: str = "auto"
    convert: str = "auto"  # one of CONVERTS: what a pooling model gives
    pooler_config: dict[str, Any] | None = None  # how a pooling model pools, with vLLM's keys
    # Other values for keys of config.json
    hf_overrides: dict[str, Any] | None = None
    revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    # Tokens (also "32k"); "auto" or -1: the longest that fits; None: the model's own
    max_model_len: int | str | None = None
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    # The method of a quantised checkpoint, or what plain weights are rounded to while they are
    # loaded, one of `quantisation.ONLINE`; None: weights as the checkpoint holds them
    quantization: str | None = None
    kv_cache_dtype: str = "auto"  # one of KV_CACHE_DTYPES
    enable_prefix_caching: bool = True
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    # Groups of these devices that have experts of their own; enable_expert_parallel: each is one
    expert_parallel_size: int | None = None
    enable_expert_parallel: bool = False
    # Stages of layers, each on tensor_parallel_size devices of its own
    pipeline_parallel_size: int = 1
    # Hosts that run this engine together. The one of rank 0 listens at master_addr, at this port
    # and the next
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    group_key_file: str | None = None  # with what every host of the group has and nobody else
    max_logprobs: int = 20  # -1: as many as the vocabulary has
    # One of LOGPROBS_MODES; "processed" is after temperature, filters and processors
    logprobs_mode: str = "raw_logprobs"
    max_num_queued_reqs: int | None = None
    async_scheduling: bool = True
    scheduling_policy: str = "fcfs"  # one of SCHEDULING_POLICIES
    preemption_mode: str = "recompute"  # one of PREEMPTION_MODES
    # GiB of host memory per device for pages of preempted requests; None: SWAP_SPACE
    swap_space: float | None = None
    # GiB of host memory for cached prefixes that leave the pool
    kv_offloading_size: float | None = None
    scheduler_cls: str | None = None  # module:Class of the operator's scheduler
    # Longest wait of a running stream for a chunk of another prompt; None: whole prompts
    max_stall_ms: float | None = None
    # A request's tokens do not depend on the batch around it; slower
    batch_invariant: bool = False
    # An engine that sleeps returns its GPU memory to the driver, for other processes
    enable_sleep_mode: bool = False
    enforce_eager: bool = False  # compile on first use instead of at start
    compilation_cache_dir: str | None = None
    # Directory that keeps packed and rounded weights as devices hold them
    weight_cache_dir: str | None = None
    # One of ATTENTION_BACKENDS; None: the fastest of the device that takes the model
    attention_backend: str | None = None
    profiler_dir: str | None = None
    # What is published of the prefix cache, with vLLM's keys (kv_events/settings.py)
    kv_events_config: dict[str, Any] | None = None
    # Which pages other engines get or give, with vLLM's keys (kv_transfer/settings.py)
    kv_transfer_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "max_model_len", token_count(self.max_model_len))
        except ConfigError as error:
            raise ConfigError(f"max_model_len: {error}") from None
        for name, (wanted, is_legal) in LEGAL.items():
            value = getattr(self, name)
            default = getattr(EngineConfig, name)
            if not is_legal(value) and (value is not None or default is not None):
                raise ConfigError(f"--{name.replace('_', '-')} must be {wanted}, got {value!r:.80}")
        for field in fields(self):
            # The text "no" is true
            if field.type == "bool" and type(value := getattr(self, field.name)) is not bool:
                raise ConfigError(f"{field.name} must be True or False, got {value!r:.80}")
        if self.num_gpu_blocks_override is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "--num-gpu-blocks-override and --kv-cache-memory-bytes both say how large the KV "
                "pool is; leave one of them out"
            )
        if self.enable_expert_parallel and self.expert_parallel_size is not None:
            raise ConfigError(
                "--enable-expert-parallel makes every device a group, and --expert-parallel-size "
                "says how many there are; leave one of them out"
            )
        self._check_host()
        self._check_group()
        for name in ("hf_overrides", "pooler_config", "kv_events_config", "kv_transfer_config"):
            if not isinstance(value := getattr(self, name), dict | None):
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be an object, got {value!r:.80}")
        if self.runner == "generate" and self.convert in ("embed", "classify"):
            raise ConfigError(
                f"--convert {self.convert} is for pooling models; leave out one of it and "
                "--runner generate"
            )
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"the model must be a directory, a hub id or 'demo', got {self.model!r:.80}"
            )

    def _check_group(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"--node-rank {self.node_rank} is none of the {self.nnodes} of --nnodes; they are "
                f"numbered 0 to {self.nnodes - 1}"
            )
        stages = self.pipeline_parallel_size
        if stages == 1 and self.tensor_parallel_size % self.nnodes:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size} does not divide over "
                f"--nnodes {self.nnodes}; set it, or --pipeline-parallel-size, to a multiple of "
                f"{self.nnodes}"
            )
        if stages > 1 and stages % self.nnodes:
            raise ConfigError(
                f"--pipeline-parallel-size {stages} does not divide over --nnodes {self.nnodes}, "
                f"and a stage lies on one host; set it to a multiple of {self.nnodes}, or leave it "
                "out and split layers over the hosts with --tensor-parallel-size"
            )
        if self.nnodes > 1 and self.group_key_file is None:
            raise ConfigError(
                "several hosts need a key that all of them have: set --group-key-file to a file "
                "with one (openssl rand -hex 32)"
            )
        if self.nnodes > 1 and self.weight_cache_dir is not None:
            raise ConfigError(
                "--weight-cache-dir keeps whole weights, and a host of several holds a part; "
                "leave it out"
            )
        if self.nnodes > 1 and self.kv_transfer_config is not None:
            raise ConfigError(
                "--kv-transfer-config: an engine over several hosts exchanges no pages; leave it "
                "out"
            )

    def _check_host(self) -> None:
        swaps = self.preemption_mode == "swap"
        if swaps and self.swap_space == 0:
            raise ConfigError(
                "--preemption-mode swap needs host memory, but --swap-space is 0; "
                "raise it or leave it out"
            )
        # Scripts pass the default size without a wish to swap
        if not swaps and self.swap_space not in (None, 0, SWAP_SPACE):
            raise ConfigError(
                f"--swap-space {self.swap_space:g} is for --preemption-mode swap; "
                "set that, or leave --swap-space out"
            )
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ConfigError(
                "--kv-offloading-size keeps cached prefixes, but prefix caching is off; "
                "leave one of them out"
            )


def step_seqs(max_num_seqs: int, stages: int) -> int:
    """The most requests in one step. Of several pipeline stages, each works on another share of
    them."""
    return -(-max_num_seqs // stages)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Facts, decided once at start and printed.

    Attributes (those whose names do not say it):
        vocab_size: width of the logits; token ids are validated against it.
        eos_ids: the model's tokens that end a sequence, unless a request ignores them.
        host_pages: pages of host memory for preempted requests and cached prefixes.
        host_cached_pages: those of them for cached prefixes.
        moved_pages: pages that one program moves to host memory or back; 0: none ever move.
        staged_pages: the most pages on the device at once that are on their way out or in.
        windows: tokens of the window of each of these groups, which gives back pages behind it;
            None keeps all pages.
        group_pages: pages of each cache group that has pages; those that keep all pages stand
            first.
        prefix_refusal: why no request may start from what another one has computed; None where it
            may.
        pooling: what is made of a prompt; None when the model generates.
        page_offer: what clients carry to engines that continue prompts from here (kv_transfer).
        expert_parallel_size: groups of devices that have experts of their own.
        all_reduce: how devices add up their parts of a layer, and `all_reduce_reason` why so.
        target: for which kernels are chosen, with the processors that they have to themselves.
    """

    model_dir: str
    model_type: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    page_size: int
    group_pages: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    vocab_size: int
    tensor_parallel_size: int
    max_logprobs: int
    logprobs_mode: str
    enable_prefix_caching: bool
    async_scheduling: bool
    scheduling_policy: str
    preemption_mode: str
    host_pages: int
    host_cached_pages: int
    moved_pages: int
    staged_pages: int
    attention_backend: str
    attention_reason: str
    windows: tuple[int | None, ...] = (None,)
    batch_invariant: bool = False
    prefix_refusal: str | None = None
    eos_ids: tuple[int, ...] = ()
    pooling: Pooling | None = None
    page_offer: dict[str, Any] | None = None
    all_reduce: str = "reference"
    all_reduce_reason: str = "one device"
    expert_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    target: Target = PORTABLE

    @property
    def num_pages(self) -> int:
        """Pages of the first cache group."""
        return self.group_pages[0]

    @property
    def step_seqs(self) -> int:
        """The most requests in one step, as `step_seqs` says."""
        return step_seqs(self.max_num_seqs, self.pipeline_parallel_size)

    @property
    def max_pages_per_request(self) -> int:
        """Width of a page table: the pages of a request of `max_model_len` tokens."""
        return -(-self.max_model_len // self.page_size)
