"""List the benchmarks. `--all` runs those that need no accelerator and records their results."""

from __future__ import annotations

import subprocess
import sys

HERE = {
    "throughput": "offline throughput: mixed prompts, all submitted at once",
    "latency": "offline latency of one batch of equal prompts",
    "embedding": "tokens a second of an embedding model, in the library or over HTTP, or of the "
    "host alone",
    "batching": "continuous against static batching, and KV memory waste",
    "overcommit": "a pool that holds a third of what runs at once: turns, preemption by "
    "recomputation and by swap",
    "engine": "the figures that compare engines: start, TTFT, TPOT, throughput, sampling modes, "
    "prefix reuse",
    "first_token": "what the host does for the first token of a prompt alone, without a device",
    "structured": "what structured output costs: batches that are free, that follow a JSON "
    "schema, and of both",
    "invariance": "a request alone and in a crowd, bit by bit, with batch_invariant and without, "
    "and what it costs",
    "serving": "load on an OpenAI-compatible server: TTFT, TPOT, ITL, goodput at a request rate",
    "stall": "the worst gap of running streams while a long prompt arrives at a server",
    "startup": "process start to first token, with empty caches and in a second process",
    "apart": "prefill and decode on a GPU each, beside one GPU for both: TTFT, worst gap, and the "
    "prefill server killed",
    "kv_transfer": "pages of keys and values between two processes: GB/s through shared memory and "
    "through TCP",
    "sleep": "a server that sleeps, wakes up and takes other weights: seconds, and memory of the "
    "device",
    "loading": "loading a checkpoint of random safetensors: GB/s and host memory",
    "profile": "where the time of decode steps goes, by kernel",
    "kernels": "attention and other kernels on the GPU at hand",
    "process": "penalties, biases and masks between a forward and the draw",
    "sampling": "draws and log-probabilities, what follows a forward",
    "correctness": "is what the device computes right: kernels, a whole model, an engine's "
    "invariants, the demo model, a soak",
    "streaming": "what a streamed token costs the server, parsers off and on, before and after",
    "paced_engine": "a server over an engine without a model, for `streaming`",
    "parsers": "what reading reasoning and tool calls costs: tokens a second and core, each format",
    "templates": "what rendering a chat costs, and what one that hangs costs others",
    "kv_accuracy": "what 8-bit pages cost the demo model: answers and perplexity",
    "weight_accuracy": "what weights in few bits and 8-bit pages cost the demo model: held-out "
    "conversations",
    "products": "an MLP's gated product: the kernel beside XLA",
    "fp8_products": "products with 8-bit weights: the kernel beside cuBLASLt and bfloat16",
    "int4_products": "products with 4-bit weights: the kernel beside bfloat16",
    "mixtures": "a mixture's routed feed-forward: its grouped products, and the whole",
    "mixture_layers": "a mixture's half of a layer, norm to norm, and variants of it",
    "collective": "a sum over GPUs with residual sum and norm: plain stores, NCCL, XLA's own; "
    "and a device that leaves one out",
    "routing": "what stands around the products of a mixture's experts: routing, gather, sum",
    "segments": "attention of encoders: microseconds and TFLOP/s of a step, by length of inputs",
    "steps": "what step programs of chosen shapes take under load",
    "xla_options": "which XLA options make each program fastest on the GPU at hand",
    "ceilings": "what the device does at best: copies, reads, matrix products",
    "shapes": "write a real model's shape, for a server with random weights",
    "plots": "draw docs/plots/ from the recorded results",
    "import_driver": "take figures into the record of an engine",
    "report": "the tables of the recorded results, as in README.md",
}


def main() -> int:
    """Print the list, or run everything."""
    if "--all" not in sys.argv[1:]:
        print("usage: python -m benchmarks.NAME [--help], or python -m benchmarks --all\n")
        print("\n".join(f"  {name:<14} {text}" for name, text in HERE.items()))
        return 0
    for name in ("throughput", "latency", "batching"):
        code = subprocess.call([sys.executable, "-m", f"benchmarks.{name}", "--save"])
        if code:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
