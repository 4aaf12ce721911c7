"""The `jaxllm` command. Each verb imports what it needs when it runs."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import runpy
import sys

import jaxllm
from jaxllm.server.command_line.pipes import while_read

USAGE = """\
usage: jaxllm VERB [options]

  serve MODEL [options]   serve a model over the OpenAI protocol; options: `jaxllm serve --help`
  chat [options]          talk to a model of a running server at the terminal
  complete [options]      continue texts by a model of a running server
  check MODEL [options]   say whether a model fits this machine with these options of serve
  convert FROM TO         write a checkpoint in another type, files of another size, or as served
  bench NAME [options]    run a benchmark of a checkout, such as `jaxllm bench throughput --help`
  models                  list the model families that run
  collect-env             print versions and devices for a bug report
  completion SHELL        print what lets bash, zsh or fish complete this command
  --version               print the version
"""


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit status: SIGPIPE's if `| head` ends."""
    arguments = sys.argv[1:]
    if argv is not None:
        arguments = argv
    return while_read(lambda: run(arguments))


def run(argv: list[str]) -> int:
    """Run one verb; returns its status."""
    verb, *rest = argv or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if verb in ("-V", "--version", "version"):
        print(jaxllm.__version__)
        return 0
    if verb not in VERBS:
        meant = difflib.get_close_matches(verb, VERBS, 1)
        if meant:
            hint = f"did you mean {meant[0]}?"
        else:
            hint = f"one of {', '.join(VERBS)}"
        print(f"jaxllm: unknown verb {verb!r}; {hint}", file=sys.stderr)
        return 2
    return VERBS[verb](rest)


def serve(argv: list[str]) -> int:
    """`serve MODEL …` is `python -m jaxllm.server --model MODEL …`."""
    from jaxllm.server.__main__ import main as serve_main

    if argv and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    return int(serve_main(argv) or 0)


def chat(argv: list[str]) -> int:
    """Talk to a running server."""
    from jaxllm.cli.talk import chat as talk

    return talk(argv, os.environ)


def complete(argv: list[str]) -> int:
    """Continue texts by a running server."""
    from jaxllm.cli.talk import complete as talk

    return talk(argv, os.environ)


def check(argv: list[str]) -> int:
    """Whether a model fits, without loading it."""
    from jaxllm.cli.fit import check as check_fit

    return check_fit(argv, os.environ)


def convert(argv: list[str]) -> int:
    """Write a checkpoint anew."""
    from jaxllm.cli.convert import convert as rewrite

    return rewrite(argv, os.environ)


def completion(argv: list[str]) -> int:
    """Print a shell's script."""
    from jaxllm.cli.shells import SHELLS, script

    if len(argv) != 1 or argv[0] not in SHELLS:
        return _told(f"usage: jaxllm completion {'|'.join(SHELLS)}", argv)
    print(script(argv[0], VERBS), end="")
    return 0


def bench(argv: list[str]) -> int:
    """`bench NAME …` is `python -m benchmarks.NAME …`; the benchmarks live in the repository, not
    in the wheel."""
    sys.path.insert(0, "")
    if argv[:1] == ["serve"]:  # vLLM's name of it
        argv = ["serving", *argv[1:]]
    name = "benchmarks"
    if argv and not argv[0].startswith("-"):
        name = f"benchmarks.{argv[0]}"
    if importlib.util.find_spec("benchmarks") is None or importlib.util.find_spec(name) is None:
        print(
            f"jaxllm bench: no {name} here; run it from a checkout of the repository, "
            "where benchmarks/ is",
            file=sys.stderr,
        )
        return 2
    if name != "benchmarks":
        sys.argv = [f"jaxllm bench {argv[0]}", *argv[1:]]
    else:
        sys.argv = ["jaxllm bench", *argv]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def models(argv: list[str]) -> int:
    """Print each `model_type` that runs, what it does here, and what it is."""
    if argv:
        return _without_options("models", argv)
    from jaxllm.models import families, state, summary

    rows = [(name, state(name), summary(name)) for name in families()]
    name_width, state_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, status, text in rows:
        print(f"{name:{name_width}}  {status:{state_width}}  {text}")
    return 0


def collect_env(argv: list[str]) -> int:
    """Print the machine's fingerprint as JSON."""
    if argv:
        return _without_options("collect-env", argv)
    from jaxllm.environment import fingerprint

    print(json.dumps(fingerprint(), indent=2))
    return 0


def _without_options(verb: str, argv: list[str]) -> int:
    """The usage of a verb that is given options and takes none; see `_told`."""
    text = f"jaxllm {verb} takes no options"
    if _asks_help(argv):
        line = next(line for line in USAGE.splitlines() if line.split()[:1] == [verb])
        text = f"usage: jaxllm {verb}\n\n{line.split(maxsplit=1)[1]}"
    return _told(text, argv)


def _told(text: str, argv: list[str]) -> int:
    """Print it: status 0 where help was asked for, else 2 and on stderr."""
    if _asks_help(argv):
        print(text)
        return 0
    print(text, file=sys.stderr)
    return 2


def _asks_help(argv: list[str]) -> bool:
    return argv in (["-h"], ["--help"])


VERBS = {
    "serve": serve,
    "chat": chat,
    "complete": complete,
    "check": check,
    "convert": convert,
    "bench": bench,
    "models": models,
    "collect-env": collect_env,
    "completion": completion,
}
