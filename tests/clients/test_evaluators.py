"""Programs that measure servers run against this one as they are installed: a harness of
evaluations, two load generators, and one that tries whatever the OpenAPI document allows and
forbids.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.environments import need, pip_install, run
from tests.server.demo_server import Demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LM_EVAL = ("lm-eval[api]==0.4.13", "transformers==5.23.0")
AIPERF = ("aiperf==0.13.0",)
GUIDELLM = ("guidellm==0.8.1",)  # with torch: minutes to install
SCHEMATHESIS = ("schemathesis==4.32.5",)

UNTIL = ["\n", ".", "Q:", "A:", "!", "?"]  # more than OpenAI's four
QUESTIONS = ["The quick brown fox", "What is 27 + 45?", "hello", "sort 7 2 9"]
CHOICES = [
    {
        "question": "The quick brown fox jumps over the lazy",
        "options": ["dog", "weather", "42"],
        "label": 0,
    },
    {"question": "The capital of France is", "options": ["number", "Paris", "7"], "label": 1},
]
TOKENS, REQUESTS = 24, 24
ADMIN = "operator"
# What no fuzzer should do: put the model to sleep, which is 503 for all; a stream without an end
LEFT_OUT = "^/sleep$|^/stats/stream$"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance"
)


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """The demo model's server, which is well at the end."""
    need(sys.executable, "-m", "pip", "index", "versions", "openai")
    demo = Demo("--admin-key", ADMIN)
    try:
        yield demo
        assert demo.metric("jaxllm:compiles_after_warmup_total") == 0
        assert demo.metric("jaxllm:engine_step_failures_total") == 0
        assert demo.stop() == 0
        assert "Traceback" not in demo.log
    finally:
        demo.close()


def task(folder: pathlib.Path, name: str, rows: list[dict[str, Any]], **fields: Any) -> None:
    """A task of lm-eval over these rows."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    (folder / f"{name}.yaml").write_text(json.dumps(described | fields))


def metric(name: str) -> dict[str, Any]:
    """One that is the mean over rows."""
    return {"metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True}]}


def test_lm_eval_hears_what_the_server_says(
    demo: Demo, repo: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    programs = pip_install(tmp_path / "venv", *LM_EVAL)
    said = []
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none") as client:
        for question in QUESTIONS:
            reply = client.completions.create(
                model="demo", prompt=question, max_tokens=TOKENS, temperature=0, stop=UNTIL
            )
            said.append({"question": question, "answer": reply.choices[0].text})
    generation = {"until": UNTIL, "max_gen_toks": TOKENS, "do_sample": False}
    (tasks := tmp_path / "tasks").mkdir()
    task(
        tasks,
        "said",
        said,
        output_type="generate_until",
        doc_to_target="{{answer}}",
        generation_kwargs=generation,
        **metric("exact_match"),
    )
    likely: Any = {"doc_to_target": "label", "doc_to_choice": "{{options}}"} | metric("acc")
    task(tasks, "likely", CHOICES, output_type="multiple_choice", **likely)
    model = {
        "model": "demo",
        "base_url": f"{demo.url}/v1/completions",
        "tokenizer": str(repo / "jaxllm" / "demo"),
        "num_concurrent": "4",
    }
    done = run(
        [
            *(str(programs / "lm_eval"), "--model", "local-completions"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
            *("--include_path", str(tasks), "--tasks", "said,likely"),
            *("--output_path", str(tmp_path / "results")),
        ],
        cwd=tmp_path,
        HF_HUB_OFFLINE="1",
        HF_DATASETS_CACHE=str(tmp_path / "data"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (file,) = (tmp_path / "results").rglob("results*.json")
    results = json.loads(file.read_text())["results"]
    assert results["said"]["exact_match,none"] == 1
    assert results["likely"]["acc,none"] == 1


@pytest.fixture(scope="module")
def aiperf(tmp_path_factory: pytest.TempPathFactory, demo: Demo) -> pathlib.Path:
    """Its program."""
    return pip_install(tmp_path_factory.mktemp("aiperf"), *AIPERF) / "aiperf"


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf_finishes_every_request(
    kind: str, aiperf: pathlib.Path, demo: Demo, repo: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    done = run(
        [
            *(str(aiperf), "profile", "--model", "demo", "--url", demo.url),
            *("--endpoint-type", kind, "--streaming", "--tokenizer", str(repo / "jaxllm" / "demo")),
            *("--concurrency", "4", "--request-count", str(REQUESTS), "--isl", "40"),
            *("--osl", str(TOKENS), "--extra-inputs", "ignore_eos:true", "--ui", "none"),
            *("--use-server-token-count", "--artifact-dir", str(tmp_path / "results")),
        ],
        cwd=tmp_path,
        HF_HUB_OFFLINE="",  # offline it takes a path for the name of a repository
    )
    assert done.returncode == 0, done.stdout[-4000:]
    results = json.loads((tmp_path / "results" / "profile_export_aiperf.json").read_text())
    assert results["request_count"]["avg"] == REQUESTS
    assert results["output_sequence_length"]["avg"] == TOKENS
    assert not results["error_summary"]


@pytest.fixture(scope="module")
def guidellm(tmp_path_factory: pytest.TempPathFactory, demo: Demo) -> pathlib.Path:
    """Its program."""
    return pip_install(tmp_path_factory.mktemp("guidellm"), *GUIDELLM) / "guidellm"


def finished(demo: Demo) -> float:
    """Requests that the server has answered so far."""
    return demo.metric("vllm:request_prompt_tokens_count")


@pytest.mark.parametrize("kind", ["chat/completions", "completions", "responses"])
def test_guidellm_finishes_every_request(
    kind: str, guidellm: pathlib.Path, demo: Demo, repo: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    backend = {"target": demo.url, "model": "demo", "request_format": f"/v1/{kind}"}
    asked = {
        "backend": {"kind": "openai_http"} | backend,
        "profile": {"kind": "concurrent", "streams": 4},
        "data": {"kind": "synthetic_text", "prompt_tokens": 40, "output_tokens": TOKENS},
        "constraint": {"kind": "max_requests", "count": REQUESTS},
        "tokenizer": {"kind": "huggingface_auto", "model": repo / "jaxllm" / "demo"},
        "output": {"kind": "json", "path": "results.json"},
    }
    options = [
        word
        for name, fields in asked.items()
        for word in (f"--{name}", ",".join(f"{key}={value}" for key, value in fields.items()))
    ]
    before = finished(demo)
    done = run(
        [str(guidellm), "run", *options, "--disable-console"], cwd=tmp_path, HF_HUB_OFFLINE="1"
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (made,) = json.loads((tmp_path / "results.json").read_text())["benchmarks"]
    totals = made["metrics"]["request_totals"]
    # On a busy machine it starts a few less than it was told
    assert REQUESTS // 2 <= totals["successful"] == totals["total"] == finished(demo) - before
    tokens = made["metrics"]["output_token_count"]["successful"]
    assert tokens["min"] == tokens["max"] == TOKENS


def test_schemathesis_finds_no_answer_that_the_document_lacks(
    demo: Demo, tmp_path: pathlib.Path
) -> None:
    programs = pip_install(tmp_path / "venv", *SCHEMATHESIS)
    done = run(
        [
            *(str(programs / "schemathesis"), "run", f"{demo.url}/openapi.json"),
            *("--mode", "all", "--checks", CHECKS, "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", "15", "--continue-on-failure", "--seed", "1", "--workers", "2"),
            *("--exclude-path-regex", LEFT_OUT, "--header", f"Authorization: Bearer {ADMIN}"),
            *("--suppress-health-check", "all", "--request-timeout", "60"),
        ],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert demo.process.poll() is None
