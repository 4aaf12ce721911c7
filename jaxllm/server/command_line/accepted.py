"""Flags of other servers and of their older releases: without effect here, or refused with the name
of what serves instead."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config import ConfigError

ANY = None  # every value is without effect


@dataclass(frozen=True)
class Accepted:
    """What a flag of another server may say here.

    Attributes:
        values: texts without effect, in lower case; others are refused. ANY refuses nothing.
        note: why it has no effect, or what to use instead.
        switch: it is --flag or --no-flag, whose texts are "true" and "false".
    """

    values: tuple[str, ...] | None
    note: str
    switch: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def help(self) -> str:
        """The line of --help=all."""
        if self.values == () or (self.switch and self.values == ("false",)):
            return f"refused: {self.note}"
        if self.values is ANY or self.switch:
            taken = ""
        else:
            taken = f" ({', '.join(self.values)})"
        return f"no effect{taken}: {self.note}"


def switch(note: str, *values: str) -> Accepted:
    """A flag without a value; by default both forms of it change nothing."""
    return Accepted(values or ANY, note, switch=True)


def value(note: str, *values: str, aliases: tuple[str, ...] = ()) -> Accepted:
    """A flag whose `values` change nothing."""
    return Accepted(values, note, aliases=aliases)


def refused(instead: str, *aliases: str) -> Accepted:
    """A flag that nothing here honours."""
    return Accepted((), instead, aliases=aliases)


def refused_switch(instead: str, *aliases: str) -> Accepted:
    """A flag without a value that nothing here honours; its negative form is what happens."""
    return Accepted(("false",), instead, switch=True, aliases=aliases)


PRECOMPILED = "every shape is compiled at start (--enforce-eager compiles on first use)"
NO_LORA = "adapters are not supported yet"
NO_DRAFTS = "speculative decoding is not supported yet"
SPLITS = "--tensor-parallel-size splits a model over devices, with --nnodes over several hosts"
NO_ACCESS_LOG = "requests are logged with --access-log alone, and probes never"
NO_MEDIA = "models take text alone"
TOKENIZER_THREADS = "tokenizers run in threads of the server"
ENGINES_HERE = "--data-parallel-size starts engines on this host alone"

ACCEPTED: dict[str, Accepted] = {
    # Model
    "tokenizer-revision": refused("--revision is that of model and tokenizer"),
    "code-revision": Accepted(ANY, "code from a repository is never run"),
    "config-format": value("config.json is read", "auto", "hf"),
    "hf-config-path": refused("config.json is the model's; --hf-overrides changes its keys"),
    "safetensors-load-strategy": Accepted(ANY, "files are mapped into memory"),
    "model-loader-extra-config": value("there is one loader", "{}"),
    "ignore-patterns": Accepted(ANY, "only what is needed is downloaded"),
    "model-impl": value("models are jaxllm's own", "auto", "vllm"),
    "task": refused("say --runner, and --convert for pooling models"),
    "device": value("JAX_PLATFORMS chooses the device", "auto"),
    "rope-scaling": refused("--hf-overrides '{\"rope_scaling\": …}'"),
    "rope-theta": refused("--hf-overrides '{\"rope_theta\": …}'"),
    "logits-processors": refused("LLM(logits_processors=…) in the library"),
    "override-pooler-config": refused("--pooler-config"),
    "enable-prompt-embeds": refused_switch("prompts are texts or token ids"),
    "quantization-param-path": refused("scales of keys and values are the checkpoint's"),
    "additional-config": value("there is none", "{}"),
    "tokenizer-pool-size": Accepted(ANY, TOKENIZER_THREADS),
    "tokenizer-pool-type": Accepted(ANY, TOKENIZER_THREADS),
    "tokenizer-pool-extra-config": Accepted(ANY, TOKENIZER_THREADS),
    "limit-mm-per-prompt": Accepted(ANY, NO_MEDIA),
    "mm-processor-cache-gb": Accepted(ANY, NO_MEDIA),
    "disable-mm-preprocessor-cache": switch(NO_MEDIA),
    "allowed-local-media-path": Accepted(ANY, NO_MEDIA),
    "mm-processor-kwargs": refused(NO_MEDIA),
    # Memory and scheduler
    "calculate-kv-scales": refused_switch("scales are a token's and head's, or the checkpoint's"),
    "disable-sliding-window": refused_switch("--hf-overrides '{\"sliding_window\": null}'"),
    "long-prefill-token-threshold": value("--max-stall-ms bounds chunks", "0"),
    "max-num-partial-prefills": Accepted(ANY, "--max-stall-ms bounds chunks"),
    "max-long-partial-prefills": Accepted(ANY, "--max-stall-ms bounds chunks"),
    "max-num-active-seqs": refused("--max-num-seqs"),
    "watermark": value("admission forecasts what running requests will need", "0", "0.0"),
    "scheduler-delay-factor": value("--max-stall-ms bounds waiting", "0", "0.0"),
    "num-scheduler-steps": Accepted(ANY, "the next step is planned while one runs"),
    "num-lookahead-slots": Accepted(ANY, "the next step is planned while one runs"),
    "multi-step-stream-outputs": switch("the next step is planned while one runs"),
    "disable-async-output-proc": switch("--no-async-scheduling plans after each step"),
    "use-v2-block-manager": switch("there is one manager of pages"),
    "disable-cascade-attn": switch("attention has no such mode"),
    "disable-hybrid-kv-cache-manager": switch("layers with windows keep what they see"),
    # Parallel
    "decode-context-parallel-size": value(SPLITS, "1"),
    "distributed-executor-backend": value(SPLITS, "mp", "uni"),
    "worker-use-ray": refused_switch(SPLITS),
    "engine-use-ray": refused_switch(SPLITS),
    "worker-cls": value("code of others is never run", "auto"),
    "worker-extension-cls": refused("code of others is never run"),
    "data-parallel-backend": value("engines are processes of this host", "mp"),
    "data-parallel-size-local": refused(ENGINES_HERE, "-dpl"),
    "data-parallel-address": refused(ENGINES_HERE, "-dpa"),
    "enable-eplb": refused_switch("experts stay where they are; see --expert-parallel-size"),
    "max-parallel-loading-workers": Accepted(ANY, "tensors are read one after the other"),
    "disable-custom-all-reduce": switch("collectives are XLA's"),
    # Compiling
    "compilation-config": Accepted(ANY, PRECOMPILED, aliases=("-cc",)),
    "optimization-level": Accepted(ANY, PRECOMPILED, aliases=("-O",)),
    "cudagraph-capture-sizes": Accepted(ANY, PRECOMPILED),
    "cuda-graph-sizes": Accepted(ANY, PRECOMPILED),
    "max-seq-len-to-capture": Accepted(ANY, PRECOMPILED),
    "max-context-len-to-capture": Accepted(ANY, PRECOMPILED),
    "jit-monitor-mode": value("jaxllm:compiles_after_warmup_total counts", "warn"),
    # Adapters and drafts
    "enable-lora": refused_switch(NO_LORA),
    "enable-prompt-adapter": refused_switch("prompt adapters are not supported"),
    "lora-modules": refused(NO_LORA),
    "max-loras": Accepted(ANY, NO_LORA),
    "max-lora-rank": Accepted(ANY, NO_LORA),
    "max-cpu-loras": Accepted(ANY, NO_LORA),
    "lora-dtype": Accepted(ANY, NO_LORA),
    "lora-extra-vocab-size": Accepted(ANY, NO_LORA),
    "long-lora-scaling-factors": Accepted(ANY, NO_LORA),
    "fully-sharded-loras": switch(NO_LORA),
    "enable-lora-bias": refused_switch(NO_LORA),
    "max-prompt-adapters": Accepted(ANY, "prompt adapters are not supported"),
    "max-prompt-adapter-token": Accepted(ANY, "prompt adapters are not supported"),
    "qlora-adapter-name-or-path": refused(NO_LORA),
    "speculative-config": refused(NO_DRAFTS, "-sc"),
    "spec-method": refused(NO_DRAFTS),
    "spec-model": refused(NO_DRAFTS),
    "spec-tokens": refused(NO_DRAFTS),
    "speculative-model": refused(NO_DRAFTS),
    "num-speculative-tokens": refused(NO_DRAFTS),
    "ngram-prompt-lookup-max": refused(NO_DRAFTS),
    "ngram-prompt-lookup-min": refused(NO_DRAFTS),
    "speculative-max-model-len": Accepted(ANY, NO_DRAFTS),
    "speculative-model-quantization": Accepted(ANY, NO_DRAFTS),
    "speculative-draft-tensor-parallel-size": Accepted(ANY, NO_DRAFTS, aliases=("-spec-draft-tp",)),
    "speculative-disable-by-batch-size": Accepted(ANY, NO_DRAFTS),
    "speculative-disable-mqa-scorer": switch(NO_DRAFTS),
    "spec-decoding-acceptance-method": Accepted(ANY, NO_DRAFTS),
    "typical-acceptance-sampler-posterior-threshold": Accepted(ANY, NO_DRAFTS),
    "typical-acceptance-sampler-posterior-alpha": Accepted(ANY, NO_DRAFTS),
    "disable-logprobs-during-spec-decoding": Accepted(ANY, NO_DRAFTS),
    # Chats
    "enable-auto-tool-choice": switch("it is always on"),
    "exclude-tools-when-tool-choice-none": switch("it is always on"),
    "enable-reasoning": switch("see --reasoning-parser"),
    "tool-parser-plugin": refused("code of others is never run; see --tool-call-parser"),
    "reasoning-parser-plugin": refused("code of others is never run; see --reasoning-parser"),
    "response-role": value("a continued message keeps its role", "assistant"),
    "chat-template-content-format": value("texts are joined by line breaks", "auto", "string"),
    "trust-request-chat-template": refused_switch("--chat-template is the operator's"),
    "structured-outputs-config": value(
        "grammars are llguidance's", '{"backend":"auto"}', '{"backend":"guidance"}', "{}"
    ),
    "return-tokens-as-token-ids": refused_switch("requests may ask: return_tokens_as_token_ids"),
    "guided-decoding-disable-fallback": switch("grammars are llguidance's, without another"),
    "guided-decoding-disable-any-whitespace": refused_switch(
        "requests may ask: structured_outputs.disable_any_whitespace"
    ),
    "guided-decoding-disable-additional-properties": refused_switch(
        "schemas may say additionalProperties: false"
    ),
    # HTTP
    "middleware": refused("code of others is never run"),
    "enable-request-id-headers": switch("every reply has x-request-id"),
    "enable-prompt-tokens-details": switch("usage always has them"),
    "enable-server-load-tracking": switch("requests are always counted"),
    "enable-per-request-metrics": refused_switch("GET /metrics has histograms of these times"),
    "enable-tokenizer-info-endpoint": refused_switch("POST /tokenize shows ids and tokens"),
    "enable-offline-docs": switch("/docs never loads from other hosts"),
    "enable-scale-out": switch("/v1/…/render is always there"),
    "tokens-only": refused_switch("--skip-tokenizer-init"),
    "fingerprint-mode": value("a digest of version and configuration", "full", "hash"),
    "sse-keep-alive-interval": value("streams have no comments", "0", "0.0"),
    "api-server-count": value("one process speaks HTTP", "1", aliases=("-asc",)),
    "headless": refused_switch("one process speaks HTTP, and starts the engines"),
    "disable-frontend-multiprocessing": switch("the engine has a process of its own"),
    "h11-max-incomplete-event-size": refused("heads have a fixed limit, see docs/api.md"),
    "h11-max-header-count": refused("heads have a fixed limit, see docs/api.md"),
    # Logging
    "disable-log-requests": switch("it is the default; see --enable-log-requests"),
    "max-log-len": Accepted(ANY, "texts of requests are never logged"),
    "enable-log-outputs": refused_switch("texts of answers are never logged"),
    "uvicorn-log-level": Accepted(ANY, "--log-level is that of the whole server"),
    "disable-uvicorn-access-log": switch(NO_ACCESS_LOG),
    "disable-access-log-for-endpoints": Accepted(ANY, NO_ACCESS_LOG),
    "logging-config": refused("--log-level and --log-format"),
    "log-config-file": refused("--log-level and --log-format"),
    "kv-cache-metrics": refused_switch("GET /metrics counts prefixes and pages"),
    "custom-histogram-buckets": refused("buckets are those of the stock dashboards"),
    "show-hidden-metrics-for-version": Accepted(ANY, "older names of metrics are there always"),
    "collect-detailed-traces": refused("--otlp-traces-endpoint traces whole requests"),
    "profiler-config": refused("--profiler-dir"),
    "ray-workers-use-nsight": refused_switch("--profiler-dir"),
    "use-tqdm-on-load": switch("--log-format json says lines instead of bars"),
}


def check_accepted(flags: dict[str, list[str] | bool]) -> list[str]:
    """A notice for each of these flags of ACCEPTED, which have no effect. Raises ConfigError for a
    value that would have one."""
    notices = []
    for name, value in flags.items():
        flag = ACCEPTED[name]
        if isinstance(value, bool):
            words = [str(value).lower()]
        else:
            words = value
        if value is False:
            shown = f"--no-{name}"
        else:
            shown = f"--{name}"
        text = " ".join(words).replace(" ", "").lower()
        if flag.values is not ANY and text not in flag.values:
            if not flag.switch:
                shown = " ".join([shown, *words])[:80]
            raise ConfigError(f"{shown} is not supported here: {flag.note}")
        notices.append(f"{shown} has no effect: {flag.note}")
    return notices
