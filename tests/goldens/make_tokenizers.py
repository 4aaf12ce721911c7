"""Makes tokenizers/: small tokenizers in formats that have no tokenizer.json, and the ids that
their own libraries give for texts.

Needs sentencepiece, tiktoken, mistral-common, regex and protobuf, which the tests do not:
`python tests/goldens/make_tokenizers.py`. Vocabularies are trained on the texts of LINES.
SentencePiece knows no text between special tokens; for Llama, where a prefix belongs to the first
part alone, transformers' own class is the reference.
"""

from __future__ import annotations

import base64
import io
import json
import pathlib
import random
import re
import unicodedata
from collections.abc import Callable

import sentencepiece
import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tiktoken._educational import bpe_train
from transformers import LlamaTokenizer

from jaxllm.tokenizer_files.formats import glm4, hunyuan, kimi, qwen
from jaxllm.tokenizer_files.tiktoken import PATTERN

OUT = pathlib.Path(__file__).parent / "tokenizers"
LINES = """All human beings are born free and equal in dignity and rights.
Tous les êtres humains naissent libres et égaux en dignité et en droits.
Alle Menschen sind frei und gleich an Würde und Rechten geboren; sie sind's, they're, we'll.
Все люди рождаются свободными и равными в своём достоинстве и правах.
人人生而自由，在尊严和权利上一律平等。すべての人間は、生まれながらにして自由であり
يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.
def f(x):\n    return [x ** 2 for x in range(100)]  # squares
In 2024 it cost 1234567 or 3.14159, and    many   spaces.
aa aaa aaaaaaaa ==== ======== -------- naïve café Straße don't can't won't shouldn't
wouldn't""".split("\n")
FIXED = [
    "",
    " ",
    "a",
    "Hello, world!",
    " leading and trailing ",
    "two  three   four    spaces",
    "tabs\tand\nlines\n\n\nand\r\nmore",
    "aaaaaaaaaaaaaaaaaaaaaaa",
    "=" * 33 + "-" * 17,
    " " * 40 + "x",
    "DON'T they're I'LL we'd ſ's",
    "1234567890 ١٢٣ ½ ²",
    "naïve café Å Å ﬁ ＡＢＣ",
    "🎉🚀👩‍👩‍👧 emoji 😀",
    "混合 English 文本 テキスト 텍스트",
    "▁ literal <0x41> <pad_>x",
    "\x00\x01\x7f\u200b\u3000",
    "def f(x):\n\treturn x**2  # x",
]


def texts() -> list[str]:
    """Fixed ones, and random characters and words of LINES."""
    rng = random.Random(7)
    words = " ".join(LINES).split(" ")
    ranges = [
        (32, 126),
        (32, 126),
        (0xA0, 0x24F),
        (0x400, 0x4FF),
        (0x4E00, 0x4FFF),
        (0x1F300, 0x1F5FF),
    ]
    found = list(FIXED)
    for _ in range(12):
        found.append(" ".join(rng.choices(words, k=rng.randrange(1, 8))))
        found.append(
            "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randrange(1, 20)))
        )
    return found


def save(name: str, files: dict[str, bytes], settings: dict[str, object]) -> None:
    """Write the directory of one tokenizer."""
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def sentencepiece_model(**options: object) -> bytes:
    """A model trained on LINES."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4), model_writer=model, num_threads=1,
        minloglevel=2, **options,
    )  # fmt: skip
    return model.getvalue()


LLAMA = {
    "model_type": "bpe", "vocab_size": 560, "byte_fallback": True, "character_coverage": 0.98,
    "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
    "split_digits": True, "allow_whitespace_only_pieces": True,
}  # fmt: skip


def pieces(name: str, model: bytes, settings: dict[str, object], before: list[int],
           special: dict[str, int]) -> dict[str, list[int]]:  # fmt: skip
    """A SentencePiece directory, and ids of texts: each part between special tokens is encoded
    alone, as transformers' slow tokenizers do."""
    save(name, {"tokenizer.model": model}, settings)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def encode(text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
        ids = [[special[part]] if part in special else processor.encode(part) for part in parts]
        return before + [id for part in ids for id in part]

    asked = texts() + [f"{token}one{token} two {token}" for token in special]
    return {text: encode(text) for text in asked}


def fairseq(name: str, model: bytes) -> dict[str, list[int]]:
    """A directory of XLM-RoBERTa's kind, and ids of texts: the pieces' own, one higher behind the
    special tokens."""
    save(name, {"sentencepiece.bpe.model": model}, {"tokenizer_class": "XLMRobertaTokenizer"})
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = {0: 3, 1: 0, 2: 2}

    def encode(text: str) -> list[int]:
        return [0, *(ids.get(id, id + 1) for id in processor.encode(text)), 2]

    return {text: encode(text) for text in texts()}


def by_transformers(name: str) -> dict[str, list[int]]:
    """Ids of texts by transformers' class for Llama, behind the token that it documents."""
    tokenizer = LlamaTokenizer.from_pretrained(OUT / name)
    asked = [*texts(), "</s>one</s> two</s>", "<s>a </s><s>b"]
    return {text: [1, *tokenizer(text)["input_ids"]] for text in asked}


def ranks() -> dict[bytes, int]:
    """Byte pairs trained on LINES."""
    return bpe_train("\n".join(LINES), 420, PATTERN, visualise=None)


def tiktoken_file(name: str, file: str, format: object, settings: dict[str, object],
                  special: Callable[[int], dict[str, int]]) -> dict[str, list[int]]:  # fmt: skip
    """A directory with a tiktoken file, and ids of texts by tiktoken."""
    table = ranks()
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in table.items()]
    save(name, {file: b"\n".join(lines) + b"\n"}, settings)
    named = special(len(table))
    encoding = tiktoken.Encoding(
        name, pat_str=format.pattern, mergeable_ranks=table, special_tokens=named
    )
    form = (lambda text: unicodedata.normalize("NFC", text)) if format.normalizer else str
    before = [named[token] for token in format.before]
    first = list(named)[2]
    return {
        text: before + encoding.encode(form(text), allowed_special="all")
        for text in [*texts(), f"{first}one{first} two {first}"]
    }


def tekken() -> dict[str, list[int]]:
    """A directory with tekken.json, and ids of texts by mistral-common."""
    pattern = kimi.FORMAT.pattern.replace("&&[^\\p{Han}]", "").removeprefix("[\\p{Han}]+|")
    table = ranks()
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    content = {
        "config": {
            "pattern": pattern, "num_vocab_tokens": len(table), "version": "v11",
            "default_vocab_size": len(table) + 8 - 10, "default_num_special_tokens": 8,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for token, rank in table.items()
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(special)
        ],
    }  # fmt: skip
    folder = OUT / "tekken"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(content, indent=0) + "\n")
    known = Tekkenizer.from_file(folder / "tekken.json")
    return {text: known.encode(text, bos=True, eos=False) for text in texts()}


def added(tokens: dict[str, int]) -> dict[str, object]:
    """Them as tokenizer_config.json has them."""
    return {
        str(id): {"content": token, "lstrip": False, "normalized": False, "rstrip": False,
                  "single_word": False, "special": True}
        for token, id in tokens.items()
    }  # fmt: skip


def main() -> None:
    """Write all tokenizers and tokenizers/ids.json."""
    llama = sentencepiece_model(**LLAMA)
    spaces = ["▁" * count for count in range(2, 9)]
    gemma = sentencepiece_model(
        **LLAMA
        | {"add_dummy_prefix": False, "user_defined_symbols": ["<start_of_turn>", "\n\n", *spaces]}
    )
    unused = [f"[UNUSED_TOKEN_{at}]" for at in range(3)]
    internlm2 = sentencepiece_model(**LLAMA | {"user_defined_symbols": unused})
    size = sentencepiece.SentencePieceProcessor(model_proto=internlm2)
    rules = str(OUT / "rules.tsv")  # capitals are small, tabs and line ends are spaces
    pathlib.Path(rules).write_text(
        "".join(f"{at:X}\t{at + 32:X}\n" for at in range(65, 91)) + "9\t20\nA\t20\nFB01\t66 69\n"
    )
    unigram = sentencepiece_model(
        vocab_size=190, model_type="unigram", normalization_rule_tsv=rules
    )
    start = {"<|im_start|>": size.piece_to_id(unused[1])}
    glm = {name: 560 + at for at, name in enumerate(["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"])}
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    save("llama", {"tokenizer.model": llama}, {"tokenizer_class": "LlamaTokenizer", **roles})
    cases = {
        "llama": by_transformers("llama"),
        "llama-legacy": pieces(
            "llama-legacy", llama, {"tokenizer_class": "LlamaTokenizer", "legacy": True, **roles},
            [1], {"<s>": 1, "</s>": 2},
        ),
        "unigram": pieces("unigram", unigram, {"tokenizer_class": "Own"}, [], {}),
        "xlm-roberta": fairseq("xlm-roberta", unigram),
        "gemma": pieces(
            "gemma", gemma, {"tokenizer_class": "GemmaTokenizer", **roles}, [1], {"</s>": 2}
        ),
        "internlm2": pieces(
            "internlm2", internlm2,
            {"auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
             "added_tokens_decoder": added(start), **roles},
            [1], start,
        ),
        "chatglm": pieces(
            "chatglm", llama, {"tokenizer_class": "ChatGLMTokenizer"}, [glm["[gMASK]"], glm["sop"]],
            {"[gMASK]": glm["[gMASK]"]},
        ),
        "glm4": tiktoken_file(
            "glm4", "tokenizer.model", glm4.FORMAT, {"tokenizer_class": "ChatGLM4Tokenizer"},
            lambda base: {name: base + at for at, name in enumerate(glm4.NAMES)},
        ),
        "qwen": tiktoken_file(
            "qwen", "qwen.tiktoken", qwen.FORMAT, {"tokenizer_class": "QWenTokenizer"},
            lambda base: {name: base + at for at, name in enumerate(qwen.NAMES)},
        ),
        "hunyuan": tiktoken_file(
            "hunyuan", "hy.tiktoken", hunyuan.FORMAT, {"tokenizer_class": "HYTokenizer"},
            lambda base: {name: base + at for at, name in enumerate(hunyuan.NAMES)},
        ),
        "kimi": tiktoken_file(
            "kimi", "tiktoken.model", kimi.FORMAT,
            {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]",
             "added_tokens_decoder": added({"[BOS]": 420, "<|im_end|>": 422})},
            lambda base: {
                "[BOS]": base, f"<|reserved_token_{base + 1}|>": base + 1, "<|im_end|>": base + 2
            },
        ),
        "tekken": tekken(),
    }  # fmt: skip
    pathlib.Path(rules).unlink()
    (OUT / "ids.json").write_text(json.dumps(cases, ensure_ascii=True, indent=None) + "\n")


if __name__ == "__main__":
    main()
