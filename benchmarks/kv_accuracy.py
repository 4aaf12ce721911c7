"""Accuracy with 8-bit pages: greedy answers, and the perplexity of known text.

    python -m benchmarks.kv_accuracy --save

The demo model answers its recorded prompts with every type of pages, and reads prompts and answers
teacher-forced, in one step and token by token through the pages.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.correct_engine import GOLDENS, ask, shared
from benchmarks.correct_model import PAGE, Tokens, forward
from benchmarks.record import finish, parser
from jaxllm import LLM, SamplingParams, models, weights
from jaxllm.cache.arrays import PagedArrays, Zeros
from jaxllm.cache.backends import Target, own_backend
from jaxllm.locate import locate
from jaxllm.mesh import make_mesh

type Row = dict[str, Any]

KINDS = ("auto", "fp8_e4m3", "fp8_e5m2")
PAGE_DTYPES = {"auto": None, "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
FEW = 4  # texts that are also read token by token
LENGTH = 512  # tokens of a text that are read, at most


def answers(goldens: dict[str, Any], kind: str, dtype: str) -> Row:
    """Greedy answers beside the recorded ones: how many are equal, and the share of tokens before
    they part."""
    options: dict[str, Any] = {
        "max_model_len": LENGTH,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 64,
        "enforce_eager": True,
    }
    llm = LLM("demo", dtype=dtype, kv_cache_dtype=kind, **options)
    wanted = [golden["answer_ids"] for golden in goldens.values()]
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(ids), skip_special_tokens=False)
        for ids in wanted
    ]
    found = [
        answer.token_ids
        for answer in ask(llm, [golden["prompt_ids"] for golden in goldens.values()], params, True)
    ]
    equal = sum(list(mine) == ids for mine, ids in zip(found, wanted, strict=True))
    alike = sum(shared(mine, ids) for mine, ids in zip(found, wanted, strict=True)) / sum(
        map(len, wanted)
    )
    return {
        "equal_answers": equal,
        "answers": len(wanted),
        "tokens_before_parting": round(alike, 4),
    }


class Reader:
    """The demo model's log-likelihood of texts through pages of one type, with its weights as they
    are or rounded as `--quantization` would."""

    def __init__(self, kind: str, dtype: str, quantization: str | None = None):
        self.directory, self.mesh = locate("demo", None, None), make_mesh(1)
        spec = models.read_spec(self.directory)
        formats = weights.weight_formats(self.directory, spec, quantization)
        spec = replace(spec, formats=formats)
        self.graphdef, self.state = weights.load(
            self.directory, weights.outline(spec, self.mesh, jnp.dtype(dtype))
        )
        layers, page_dtype = spec.layers, PAGE_DTYPES[kind] or dtype
        pages = LENGTH // PAGE
        self.pool = (
            PagedArrays.abstract(layers[0], len(layers), pages, PAGE, page_dtype, self.mesh),
        )
        self.backend = own_backend(Target.of(jax.devices()[0]))

    @functools.cache  # noqa: B019 - one reader reads many texts
    def program(self, chunk: int) -> Any:
        """A forward of so many tokens."""
        return jax.jit(
            functools.partial(forward, self.graphdef, self.backend, chunk),
            donate_argnums=1,
        )

    def losses(self, ids: list[int], whole: bool) -> np.ndarray:
        """Negative log-likelihood of every token but the first, read at once or one by one."""
        pool, table = Zeros()(self.pool), jnp.arange(LENGTH // PAGE, dtype=jnp.int32)[None]
        chunk, logits = LENGTH if whole else 1, []
        for at in range(0, 1 if whole else len(ids), 1):
            some = np.zeros(chunk, np.int32)
            count = len(ids) if whole else 1
            some[:count] = ids[at : at + count]
            given = Tokens(
                jnp.asarray(some),
                jnp.arange(at, at + chunk, dtype=jnp.int32),
                jnp.array([count], jnp.int32),
                table,
            )
            out, pool = self.program(chunk)(self.state, pool, given)
            logits.append(np.asarray(out[:count], np.float64))
        every = np.concatenate(logits)[:-1]
        top = every.max(axis=1, keepdims=True)
        chosen = every[np.arange(len(every)), ids[1:]]
        return np.log(np.exp(every - top).sum(axis=1)) + top[:, 0] - chosen


def perplexity(goldens: dict[str, Any], kind: str, dtype: str) -> Row:
    """Of the answers after their prompts, and of prompts and answers together, which the model has
    not learnt to say; the answers of the first few also token by token."""
    reader = Reader(kind, dtype)
    texts = [(golden["prompt_ids"] + golden["answer_ids"])[:LENGTH] for golden in goldens.values()]
    first = [len(golden["prompt_ids"]) - 1 for golden in goldens.values()]
    once = [reader.losses(ids, True) for ids in texts]
    singly = [reader.losses(ids, False) for ids in texts[:FEW]]

    def mean(losses: list[np.ndarray]) -> float:
        return round(float(np.exp(np.concatenate(losses).mean())), 6)

    return {
        "backend": reader.backend,
        "answer_tokens": sum(len(losses) - at for losses, at in zip(once, first, strict=True)),
        "perplexity": mean([losses[at:] for losses, at in zip(once, first, strict=True)]),
        "perplexity_token_by_token": mean(
            [losses[at:] for losses, at in zip(singly, first, strict=False)]
        ),
        "perplexity_with_prompts": mean(once),
    }


def main() -> None:
    """One row a type of pages; differences are to the model's own type."""
    args = parser(__doc__)
    args.add_argument("--dtype", default="float32", help="of weights and activations")
    a = args.parse_args()
    if a.model != "demo":
        args.error(
            "the demo model alone has recorded answers; benchmarks.correctness --parts narrow "
            "takes shapes"
        )
    goldens = json.loads(GOLDENS.read_text())
    found: list[Row] = []
    for kind in KINDS:
        row = (
            {"kv_cache_dtype": kind, "dtype": a.dtype}
            | answers(goldens, kind, a.dtype)
            | perplexity(goldens, kind, a.dtype)
        )
        for name in ("perplexity", "perplexity_with_prompts"):
            row[f"{name}_change"] = round(row[name] / (found[0] if found else row)[name] - 1, 6)
        found.append(row)
        print(json.dumps(row), flush=True)
    finish("kv-accuracy", a, found)


if __name__ == "__main__":
    main()
