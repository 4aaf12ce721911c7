"""The `jaxllm` command: serve, bench, models, collect-env. Each verb imports what it needs when it
runs."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys

import jaxllm

USAGE = """\
usage: jaxllm VERB [options]

  serve MODEL [options]   serve a model over the OpenAI protocol; options: `jaxllm serve --help`
  bench NAME [options]    run a benchmark of a checkout, such as `jaxllm bench throughput --help`
  models                  list the model families that run
  collect-env             print versions and devices for a bug report
  --version               print the version
"""


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    verb, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if verb in ("-V", "--version", "version"):
        print(jaxllm.__version__)
        return 0
    if verb not in VERBS:
        print(f"jaxllm: unknown verb {verb!r}; one of {', '.join(VERBS)}", file=sys.stderr)
        return 2
    return VERBS[verb](rest)


def serve(argv: list[str]) -> int:
    """`serve MODEL …` is `python -m jaxllm.server --model MODEL …`."""
    from jaxllm.server.__main__ import main as serve_main

    if argv and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    return int(serve_main(argv) or 0)


def bench(argv: list[str]) -> int:
    """`bench NAME …` is `python -m benchmarks.NAME …`; the benchmarks live in the repository, not
    in the wheel."""
    sys.path.insert(0, "")
    name = f"benchmarks.{argv[0]}" if argv and not argv[0].startswith("-") else "benchmarks"
    if importlib.util.find_spec("benchmarks") is None or importlib.util.find_spec(name) is None:
        print(
            f"jaxllm bench: no {name} here; run it from a checkout of the repository, "
            "where benchmarks/ is",
            file=sys.stderr,
        )
        return 2
    sys.argv = (
        [f"jaxllm bench {argv[0]}", *argv[1:]] if name != "benchmarks" else ["jaxllm bench", *argv]
    )
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def models(argv: list[str]) -> int:
    """Print each `model_type` that runs, and what it is."""
    if argv:
        print("jaxllm models takes no options", file=sys.stderr)
        return 2
    from jaxllm.models import families, summary

    width = max(map(len, families()))
    for name in families():
        print(f"{name:{width}}  {summary(name)}")
    return 0


def collect_env(argv: list[str]) -> int:
    """Print the machine's fingerprint as JSON."""
    if argv:
        print("jaxllm collect-env takes no options", file=sys.stderr)
        return 2
    from jaxllm.environment import fingerprint

    print(json.dumps(fingerprint(), indent=2))
    return 0


VERBS = {"serve": serve, "bench": bench, "models": models, "collect-env": collect_env}


if __name__ == "__main__":
    raise SystemExit(main())
