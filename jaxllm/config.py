"""What the user asked for (`EngineConfig`) and what was decided (`Resolved`). Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("auto", "float16", "half", "bfloat16", "float32", "float")
LOAD_FORMATS = ("auto", "safetensors", "dummy")


class ConfigError(ValueError):
    """The configuration cannot work; the message says what, the limit and the remedy in one line."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Wishes. `None` means "you decide"; names follow vLLM's engine arguments."""

    model: str = "demo"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    max_model_len: int | str | None = None  # tokens, "auto" / -1 = the largest that fits, None = from the model
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool = True
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    max_logprobs: int = 20
    max_num_queued_reqs: int | None = None
    async_scheduling: bool = True
    enforce_eager: bool = False  # compile on first use instead of at start
    compilation_cache_dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Facts, decided once at start and printed."""

    model_dir: str
    model_type: str
    dtype: str
    max_model_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    vocab_size: int  # the logits' width: token ids are validated against this
    tensor_parallel_size: int
    max_logprobs: int
    enable_prefix_caching: bool
    async_scheduling: bool
    attention_backend: str

    @property
    def max_pages_per_request(self) -> int:
        """Width of a page table: pages that a request of `max_model_len` tokens needs."""
        return -(-self.max_model_len // self.page_size)
