"""Checks that an answer does not depend on how its request is run: chunked, batched, preempted or
swapped. They run on small random models in bfloat16 and on the demo model."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.shapes import ALWAYS, SHAPES
from jaxllm import LLM, SamplingParams
from jaxllm.engine.scheduling.admission import AdmissionEstimator
from jaxllm.library.outputs import CompletionOutput, RequestOutput

type Row = dict[str, Any]

GOLDENS = Path(__file__).parents[1] / "tests" / "demo" / "goldens.json"
# A choice between two tokens whose log-probabilities are closer than this may go either way in
# bfloat16
NEAR_TIE = 0.05
# Of a log-probability in bfloat16, which has 8 bits: activations near one carry errors near 0.004,
# logits reach 4
TOLERANCE = 0.05
DEMO_TIE = 0.25  # the same for the demo model, whose logits are larger
OUTPUTS = 24
LENGTHS = (180, 120, 60, 31)  # all start in SCARCE pages, and three of them soon need another
SCARCE = 7
SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
WAYS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": len(LENGTHS),
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 24,
    "block_size": 64,
    "max_logprobs": 2,
    "async_scheduling": False,
    "enable_prefix_caching": False,
}
PATTERN = "[a-m]{2,6}(-[0-9]{1,3}){1,2}"
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": OUTPUTS,
    "ignore_eos": True,
    "logprobs": 2,
    "detokenize": False,
}
SEEDED: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.9,
    "max_tokens": OUTPUTS,
    "ignore_eos": True,
    "detokenize": False,
}


@contextmanager
def small_model(head_dim: int) -> Iterator[str]:
    """A directory with the config of a small model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps(SHAPES["tiny"] | SMALL | ALWAYS | {"head_dim": head_dim})
        )
        yield folder


def ask(
    llm: LLM, prompts: Sequence[Sequence[int]], params: list[SamplingParams], together: bool
) -> list[CompletionOutput]:
    """Every prompt's answer, all at once or one after another."""
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    if together:
        found: list[RequestOutput] = llm.generate(inputs, params, use_tqdm=False)
    else:
        found = [
            llm.generate(one, p, use_tqdm=False)[0] for one, p in zip(inputs, params, strict=True)
        ]
    return [result.outputs[0] for result in found]


class Heedless(AdmissionEstimator):
    """Admits whatever fits now, so that some of it is preempted."""

    def worthwhile_steps(self, tokens: int, rows: int, step_cost: int) -> float:
        return 0.0


def invariants(head_dims: Sequence[int] = (64, 128), **more: Any) -> Iterator[Row]:
    """Greedy tokens and their log-probabilities, run in other ways than alone, whole and step by
    step. `more` overrides options."""
    rng = random.Random(0)
    prompts = [[rng.randrange(SMALL["vocab_size"]) for _ in range(n)] for n in LENGTHS]
    params = [SamplingParams(**GREEDY)] * len(prompts)
    for head_dim in head_dims:
        with small_model(head_dim) as directory:
            llm = LLM(directory, **WAYS | more)
            backend = llm.engine.resolved.attention_backend
            alone, batched = (ask(llm, prompts, params, together) for together in (False, True))
            llm = LLM(
                directory, **WAYS | {"async_scheduling": True, "enable_prefix_caching": True} | more
            )
            overlapped = ask(llm, prompts, params, True)
            cold = llm.engine.stats().prefix_hits
            cached = ask(llm, prompts, params, False)
            hits = llm.engine.stats().prefix_hits - cold
            llm = LLM(
                directory,
                **WAYS | {"max_num_batched_tokens": 64, "num_gpu_blocks_override": SCARCE} | more,
            )
            chunked = ask(llm, prompts, params, False)
            before, llm.engine.scheduler.estimator = llm.engine.stats().preemptions, Heedless()
            preempted = ask(llm, prompts, params, True)
            preemptions = llm.engine.stats().preemptions - before
        who = {"head_dim": head_dim, "backend": backend}
        yield {"check": "batched = alone", **who, **compared(batched, alone)}
        yield {"check": "chunked = whole prefill", **who, **compared(chunked, alone)}
        yield took_place(
            {"check": "preempted = uninterrupted", **who, **compared(preempted, alone)},
            "preemptions",
            preemptions,
        )
        yield took_place(
            {"check": "prefix-cached = cold", **who, **compared(cached, alone)},
            "cached_tokens",
            hits,
        )
        yield {"check": "overlapped = synchronous", **who, **compared(overlapped, batched)}


def took_place(row: Row, name: str, count: int) -> Row:
    """The row, which is not ok unless what it is about happened."""
    return row | {name: count, "ok": row["ok"] and count > 0}


def compared(
    found: list[CompletionOutput], wanted: list[CompletionOutput], tie: float = NEAR_TIE
) -> Row:
    """Position by position until two answers part, which they may do only where the two likeliest
    tokens are nearly tied."""
    positions, parted, unexplained, largest = 0, 0, 0, 0.0
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        for token, expected, mine, theirs in zip(
            one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=False
        ):
            if token != expected:
                parted += 1
                unexplained += min(gap(mine), gap(theirs)) >= tie
                break
            positions += 1
            largest = max(largest, abs(mine[token].logprob - theirs[token].logprob))
    ok = positions > 0 and not unexplained and largest < TOLERANCE
    return {
        "tokens": positions,
        "parted_at_near_ties": parted - unexplained,
        "parted_elsewhere": unexplained,
        "logprob_difference_max": round(largest, 5),
        "tolerance": TOLERANCE,
        "ok": ok,
    }


def gap(position: dict[int, Any]) -> float:
    """How much likelier the likeliest token is than the second."""
    first, second = sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
    return first - second


def seeds(head_dim: int = 128, **more: Any) -> Iterator[Row]:
    """A seeded request alone and in a crowd of unlike ones. Alone twice must be equal; a crowd may
    turn a draw by bfloat16's rounding."""
    rng = random.Random(1)
    count = 12
    prompts = [
        [rng.randrange(SMALL["vocab_size"]) for _ in range(rng.choice(LENGTHS))]
        for _ in range(count)
    ]
    params = [SamplingParams(**SEEDED, seed=seed) for seed in range(count)]
    with small_model(head_dim) as directory:
        llm = LLM(directory, **WAYS | more)
        alone, again, crowd = (
            ask(llm, prompts, params, together) for together in (False, False, True)
        )
    same = [list(x.token_ids) == list(y.token_ids) for x, y in zip(alone, crowd, strict=True)]
    tokens = sum(shared(x.token_ids, y.token_ids) for x, y in zip(alone, crowd, strict=True))
    repeated = sum(
        list(x.token_ids) == list(y.token_ids) for x, y in zip(alone, again, strict=True)
    )
    yield {
        "check": "seeded alone = alone again",
        "requests": count,
        "equal": repeated,
        "ok": repeated == count,
    }
    parted = count - sum(same)
    rate = parted / max(1, tokens + parted)
    yield {
        "check": "seeded in a crowd = alone",
        "requests": count,
        "equal": sum(same),
        "tokens_before_parting": tokens,
        "parted_per_token": round(rate, 4),
        "bound": TOLERANCE,
        "ok": rate < TOLERANCE,
    }


MIXED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.9},
    "penalised": {
        "temperature": 0.0,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "seeded and penalised": {
        "temperature": 0.8,
        "top_k": 40,
        "min_p": 0.02,
        "frequency_penalty": 0.6,
    },
    "constrained": {"temperature": 0.0, "structured_outputs": {"regex": PATTERN}},
    "seeded and constrained": {"temperature": 1.5, "structured_outputs": {"regex": PATTERN}},
}


def mixed(of_each: int = 6, **more: Any) -> Iterator[Row]:
    """Rows of every kind in one batch, on the demo model: each gets, to the last token, what it
    gets alone, and what is constrained fits. The engine is batch-invariant, for elsewhere a crowd
    may turn a token by its rounding."""
    kinds = [kind for kind in MIXED for _ in range(of_each)]
    options = {
        "max_model_len": 128,
        "max_num_seqs": len(kinds),
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 3 * len(kinds),
    }
    llm = LLM("demo", **options | {"batch_invariant": True, "block_size": 64} | more)
    rng = random.Random(2)
    prompts = [
        llm.get_tokenizer().encode(f"{rng.randrange(100)} + {rng.randrange(100)} =") for _ in kinds
    ]
    params = [
        SamplingParams(
            **MIXED[kind],
            max_tokens=OUTPUTS,
            **({"seed": seed} if kind.startswith("seeded") else {}),
        )
        for seed, kind in enumerate(kinds)
    ]
    order = rng.sample(range(len(kinds)), len(kinds))
    alone = ask(llm, prompts, params, together=False)
    found = ask(llm, [prompts[i] for i in order], [params[i] for i in order], together=True)
    crowd = dict(zip(order, found, strict=True))
    for kind in MIXED:
        rows = [i for i, one in enumerate(kinds) if one == kind]
        equal = sum(list(crowd[i].token_ids) == list(alone[i].token_ids) for i in rows)
        fits = [
            i for i in rows if "constrained" not in kind or re.fullmatch(PATTERN, crowd[i].text)
        ]
        ok = equal == len(fits) == len(rows)
        yield {
            "check": f"mixed batch, {kind} = alone",
            "requests": len(rows),
            "equal": equal,
            "fit": len(fits),
            "ok": ok,
        }


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers begin with alike."""
    return next(
        (i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y),
        min(len(one), len(other)),
    )


def gap_after(answer: CompletionOutput, wanted: Sequence[int]) -> float:
    """The gap where an answer leaves the wanted tokens."""
    positions = answer.logprobs or []
    return gap(positions[min(shared(answer.token_ids, wanted), len(positions) - 1)])


def demo(
    dtypes: Sequence[str] = ("bfloat16", "float32"), names: Sequence[str] | None = None, **more: Any
) -> Iterator[Row]:
    """The demo model's greedy answers beside those recorded on a CPU in float32: all equal in
    float32; in bfloat16 they may part where the two likeliest tokens are nearly tied."""
    goldens = {
        name: golden
        for name, golden in json.loads(GOLDENS.read_text()).items()
        if names is None or name in names
    }
    prompts = [golden["prompt_ids"] for golden in goldens.values()]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=len(golden["answer_ids"]),
            logprobs=2,
            skip_special_tokens=False,
        )
        for golden in goldens.values()
    ]
    options: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 64,
    }
    for dtype in dtypes:
        llm = LLM("demo", **options | {"dtype": dtype, "max_logprobs": 2} | more)
        backend = llm.engine.resolved.attention_backend
        found = ask(llm, prompts, params, True)
        parted = {
            name: round(gap_after(answer, golden["answer_ids"]), 4)
            for (name, golden), answer in zip(goldens.items(), found, strict=True)
            if list(answer.token_ids) != golden["answer_ids"]
        }
        fine = not parted or (dtype != "float32" and max(parted.values()) < DEMO_TIE)
        equal = len(goldens) - len(parted)
        yield {
            "check": f"demo, {dtype}",
            "backend": backend,
            "equal": equal,
            "of": len(goldens),
            "gap_where_parted": parted,
            "ok": fine,
        }
