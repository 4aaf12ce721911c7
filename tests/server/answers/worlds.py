"""How models of each format write thoughts, calls and text, and a tokenizer that has the formats'
markers as tokens, or as text."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxllm.server.parsing.registry import reasoning_formats, tool_formats
from jaxllm.tokenizer import byte_alphabet

Call = tuple[str, dict[str, Any]]
Writer = Callable[[Sequence[Call]], str]

EOS = "<|im_end|>"
# A model of gpt-oss ends its answer with these
ENDS = (EOS, "<|call|>", "<|return|>")
# Markers that models have as tokens beside those that the parsers name
MORE_TOKENS = (
    *("<|end|>", "<|start|>", "<|constrain|>", "<|tool_call_argument_begin|>"),
    *("<｜tool▁sep｜>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<escape>"),
)


@dataclass(frozen=True)
class World:
    """How one model writes.

    Attributes:
        reasoning: its format of reasoning, by name.
        opened: the end of a prompt after which it thinks.
        closed: the end of a prompt after which it does not think.
        begin, end: markers of a thought that it writes itself.
        calls: writes calls.
        before_call: writes text before calls.
        reply: writes text that is the whole answer.
    """

    calls: Writer
    reasoning: str = "qwen3"
    opened: str = ""
    closed: str = ""
    begin: str = "<think>\n"
    end: str = "\n</think>\n\n"
    before_call: Callable[[str], str] = str
    reply: Callable[[str], str] = str

    def thought(self, text: str) -> str:
        """A thought, from where the prompt ends."""
        return ("" if self.opened else self.begin) + text + self.end


def _json(value: Any) -> str:
    """JSON as models write it: letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def _objects(key: str, calls: Sequence[Call]) -> list[str]:
    return [_json({"name": name, key: arguments}) for name, arguments in calls]


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in _objects("arguments", calls))


def _listed(before: str) -> Writer:
    return lambda calls: f"{before}[{', '.join(_objects('arguments', calls))}]"


def _pythonic(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inside = ", ".join(f"{key}={_json(value)}" for key, value in arguments.items())
        return f"{name}({inside})"

    return f"[{', '.join(one(*call) for call in calls)}]"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _functions(outer: str) -> Writer:
    """Qwen 3 Coder's tags and those of its kin."""

    def one(name: str, arguments: dict[str, Any]) -> str:
        inside = "".join(
            f"<parameter={key}>\n{_plain(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        return f"<{outer}>\n<function={name}>\n{inside}</function>\n</{outer}>"

    return lambda calls: "\n".join(one(*call) for call in calls)


def _minimax(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inside = "".join(
            f'<parameter name="{key}">{_plain(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        return (
            f'<minimax:tool_call>\n<invoke name="{name}">\n{inside}</invoke>\n</minimax:tool_call>'
        )

    return "\n".join(one(*call) for call in calls)


def _glm45(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inside = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{inside}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _gemma(value: Any) -> str:
    match value:
        case str():
            return f"<escape>{value}<escape>"
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in value.items()) + "}"
        case list():
            return f"[{','.join(map(_gemma, value))}]"
        case _:
            return _json(value)


def _written(pattern: str, between: str = "", around: str = "{}") -> Writer:
    """Calls by a pattern of NAME, ARGUMENTS and NUMBER, put between what stands around them."""

    def write(calls: Sequence[Call]) -> str:
        texts = [
            pattern.replace("NUMBER", str(number))
            .replace("NAME", name)
            .replace("ARGUMENTS", _json(arguments))
            for number, (name, arguments) in enumerate(calls)
        ]
        return around.replace("{}", between.join(texts))

    return write


_SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_QWEN_CLOSED = "<think>\n\n</think>\n\n"

WORLDS: dict[str, World] = {
    "deepseek3": World(
        _written(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
            "\n",
            _SECTION,
        ),
        reasoning="deepseek_r1",
        opened="<think>\n",
        closed="<think>\n\n</think>\n\n",
    ),
    "deepseek31": World(
        _written(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>", "", _SECTION
        ),
        opened="<think>",
        closed="</think>",
        end="</think>",
    ),
    "function_gemma": World(
        lambda calls: "".join(
            f"<start_function_call>call:{name}{_gemma(arguments)}<end_function_call>"
            for name, arguments in calls
        )
    ),
    "glm4": World(_written("NAME\nARGUMENTS")),
    "glm45": World(_glm45, "glm45", closed="\n<think></think>", begin="<think>", end="</think>\n"),
    "gpt_oss": World(
        _written(
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>"
        ),
        reasoning="gpt_oss",
        begin="<|channel|>analysis<|message|>",
        end="<|end|><|start|>assistant",
        before_call=lambda text: (
            f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant" if text else ""
        ),
        reply=lambda text: f"<|channel|>final<|message|>{text}<|return|>",
    ),
    "granite": World(
        _listed("<|tool_call|>"),
        reasoning="granite",
        begin="Here is my thought process:\n",
        end="\nHere is my response:\n",
    ),
    "hermes": World(_hermes, closed=_QWEN_CLOSED),
    "kimi_k2": World(
        _written(
            "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS"
            "<|tool_call_end|>",
            "",
            "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
        ),
        begin="<think>",
        end="</think>",
    ),
    "llama3_json": World(lambda calls: "; ".join(_objects("parameters", calls))),
    "llama4_pythonic": World(_pythonic),
    "minimax_m2": World(_minimax, "minimax_m2", "<think>\n", _QWEN_CLOSED),
    "mistral": World(
        _written("[TOOL_CALLS]NAMEARGUMENTS"),
        reasoning="mistral",
        begin="[THINK]",
        end="[/THINK]",
    ),
    "phi4_mini": World(_listed("functools")),
    "pythonic": World(_pythonic),
    "qwen3_coder": World(_functions("tool_call"), "qwen3", "<think>\n", _QWEN_CLOSED),
    "seed_oss": World(
        _functions("seed:tool_call"),
        reasoning="seed_oss",
        closed="<seed:think>\n</seed:think>\n",
        begin="<seed:think>\n",
        end="\n</seed:think>\n",
    ),
}


def markers() -> dict[str, bool]:
    """Every marker that is a token, and whether decoding without special tokens drops it, which
    all formats that write it must know."""
    formats = (*tool_formats().values(), *reasoning_formats().values())
    special = {text for parser in formats for text in parser.special}
    plain = {
        text
        for parser in formats
        for name in ("open", "close", "starts", "ends")
        for text in getattr(parser, name, ())
        if text not in parser.special and re.fullmatch(r"<[^<>]+>|\[[^\[\]]+\]", text)
    }
    tokens = sorted({*plain, *special, *MORE_TOKENS})
    return {text: text in special - plain for text in tokens}


def template() -> str:
    """A chat template that ends a prompt as the argument `opening` says."""
    openings = {
        f"{name}-{state}": getattr(world, state)
        for name, world in WORLDS.items()
        for state in ("opened", "closed")
    }
    return (
        "{%- set openings = " + json.dumps(openings, ensure_ascii=False) + " -%}"
        "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{%- for call in message.tool_calls or [] -%}"
        "[{{ call.function.name }} {{ call.function.arguments | tojson }}]{%- endfor -%}"
        "<|im_end|>\n{% endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n"
        "{{ openings[opening] }}{%- endif -%}"
    )


def write_model(directory: pathlib.Path, tokens: bool) -> pathlib.Path:
    """A model directory without weights: one token a byte, and one a marker if `tokens`."""
    backend = Backend(models.BPE(vocab=dict(byte_alphabet()), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", *ENDS])
    if tokens:
        for text, special in markers().items():
            token = AddedToken(text, normalized=False, special=special)
            (backend.add_special_tokens if special else backend.add_tokens)([token])
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "chat_template": template(),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "fake"}))
    return directory
