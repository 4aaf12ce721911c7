"""`jaxllm chat` and `jaxllm complete`: a running server at a terminal."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from jaxllm.cli.client import Client, Refused

KEY_VARIABLES = ("JAXLLM_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")
DIM = "\033[2m"
PLAIN = "\033[0m"
CHAT_HELP = """\
/reset begins a new conversation, /system TEXT one with these instructions, /exit ends.
Ctrl-C stops an answer, Ctrl-D ends. A line that ends with \\ goes on in the next."""
VERBS = {  # to the description of each and what ends its help
    "chat": ("Talk to a model of a running server.", CHAT_HELP),
    "complete": ("Continue texts by a model of a running server.", ""),
}


type Parts = Generator[tuple[str, bool]]  # texts, and whether each is reasoning


class Conversation:
    """Messages so far; `answer` adds one of the user and the answer to it."""

    def __init__(self, client: Client, body: dict[str, Any], system: str | None):
        self._client = client
        self._body = body
        self.messages: list[dict[str, str]] = []
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Forget all messages, and begin with these instructions if there are any."""
        if system is None:
            self.messages = []
        else:
            self.messages = [{"role": "system", "content": system}]

    def answer(self, text: str) -> Parts:
        """Parts of the answer as they come, and whether each is reasoning.

        What came before the iterator is closed stays in the conversation; a question without an
        answer does not.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        said: list[str] = []
        try:
            for event in self._client.events("/chat/completions", self._body | {"messages": asked}):
                for delta in (choice["delta"] for choice in event["choices"][:1]):
                    if reasoning := delta.get("reasoning"):
                        yield reasoning, True
                    if content := delta.get("content"):
                        said.append(content)
                        yield content, False
        finally:
            if said:
                self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]


def chat(argv: list[str], environ: Mapping[str, str]) -> int:
    """Talk to a model, line by line; with --quick, one question."""
    args = parser("chat").parse_args(argv)
    try:
        client = _client(args, environ)
        body = _body(args, client)
        conversation = Conversation(client, body, args.system_prompt)
        if args.quick is not None:
            _show(conversation.answer(args.quick))
            return 0
        if sys.stdin.isatty():
            print(f"{body['model']} at {args.url}\n{CHAT_HELP}")
        return _converse(conversation, args.system_prompt)
    except Refused as error:
        print(f"jaxllm chat: {error}", file=sys.stderr)
        return 1


def complete(argv: list[str], environ: Mapping[str, str]) -> int:
    """Continue texts, line by line; with --quick, one."""
    args = parser("complete").parse_args(argv)
    try:
        client = _client(args, environ)
        body = _body(args, client)
        prompts: Iterable[str] = _lines()
        if args.quick is not None:
            prompts = [args.quick]
        for text in prompts:
            events = client.events("/completions", body | {"prompt": text})
            texts = (choice["text"] for event in events for choice in event["choices"][:1])
            _show((text, False) for text in texts)
        return 0
    except Refused as error:
        print(f"jaxllm complete: {error}", file=sys.stderr)
        return 1


def parser(verb: str) -> argparse.ArgumentParser:
    """The options of one of VERBS."""
    description, epilog = VERBS[verb]
    top = argparse.ArgumentParser(
        prog=f"jaxllm {verb}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = top.add_argument
    add("--url", default="http://localhost:8000", help="of the server (default: %(default)s)")
    add("--model", "--model-name", help="its name at the server, if not the first")
    add("--api-key", help=f"key of the server; also from {', '.join(KEY_VARIABLES)}")
    add("--max-tokens", type=int, help="longest answer, in tokens")
    add("--temperature", type=_finite, help="0 always takes the likeliest token")
    add("-q", "--quick", metavar="TEXT", help="print the answer to this text and end")
    if verb == "chat":
        add("--system-prompt", help="instructions that begin the conversation")
    return top


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):  # JSON has no such numbers
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value


def _client(args: argparse.Namespace, environ: Mapping[str, str]) -> Client:
    keys = (environ.get(name) for name in KEY_VARIABLES)
    return Client(args.url, args.api_key or next(filter(None, keys), None))


def _body(args: argparse.Namespace, client: Client) -> dict[str, Any]:
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    fields = {name: value for name, value in options.items() if value is not None}
    return {"model": args.model or client.model(), **fields}


def _lines() -> Iterator[str]:
    """What the user types, until Ctrl-D or Ctrl-C."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, lets `input` edit and remember lines
    prompt = ""
    continued = ""  # the prompt of a line behind a backslash
    if sys.stdin.isatty():
        prompt = "> "
        continued = "… "
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            try:
                text = input(prompt)
                while text.endswith("\\"):
                    text = f"{text[:-1]}\n{input(continued)}"
            except UnicodeDecodeError:
                raise Refused("the text is not valid UTF-8") from None
            if text.strip():
                yield text
    if prompt:
        print()


def _converse(conversation: Conversation, system: str | None) -> int:
    for text in _lines():
        command, _, rest = text.partition(" ")
        if command == "/exit":
            break
        if command in ("/reset", "/system"):
            if command == "/system" and rest:
                conversation.reset(rest)
            else:
                conversation.reset(system)
            continue
        try:
            _show(conversation.answer(text))
        except Refused as error:
            print(f"jaxllm chat: {error}", file=sys.stderr)
            if not sys.stdin.isatty():
                return 1
    return 0


def _show(parts: Parts) -> None:
    """Print parts as they come, reasoning dimmed at a terminal; Ctrl-C ends them."""
    dims = sys.stdout.isatty()
    dim = False
    with contextlib.closing(parts), contextlib.suppress(KeyboardInterrupt):
        for text, reasoning in parts:
            if dims and reasoning != dim:
                text = (DIM if reasoning else f"{PLAIN}\n") + text
            dim = reasoning
            print(text, end="", flush=True)
    end = ""
    if dims and dim:
        end = PLAIN
    print(end)
