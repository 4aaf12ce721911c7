"""Tokenizer loading, single tokens, chat templates."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import threading
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors

from jaxllm.chat_template import TemplateError, TemplateInput, template_text
from jaxllm.config import ConfigError
from jaxllm.tokenizer import Tokenizer, byte_alphabet
from tests.server.conftest import write_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A byte-level tokenizer with a chat template."""
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(directory: pathlib.Path) -> Tokenizer:
    """It, loaded."""
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer in the manner of SentencePiece, with bytes as a fallback."""
    path = tmp_path_factory.mktemp("spaced")
    words = ["<unk>", "▁", "▁the", "a", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(
        models.BPE(
            vocab={word: at for at, word in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return Tokenizer.load(path)


def test_text_survives_the_round_trip(tokenizer: Tokenizer) -> None:
    text = "héllo \u0000 wörld 你好"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_single_tokens_are_text_and_exact_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    assert [tokenizer.token_text(id) for id in ids] == ["\ufffd", "\ufffd"]
    assert b"".join(tokenizer.token_bytes(id) for id in ids) == "é".encode()
    assert tokenizer.token_text(257) == "<|im_start|>"
    assert tokenizer.token_text(10_000) == ""
    assert tokenizer.token_bytes(10_000) == b""


def test_a_token_keeps_its_leading_space(spaced: Tokenizer) -> None:
    assert spaced.token_text(2) == " the"
    assert spaced.token_text(3) == "a"


def test_byte_fallback_tokens_are_one_byte(spaced: Tokenizer) -> None:
    assert spaced.token_bytes(5 + 0xC3) == b"\xc3"
    assert spaced.token_bytes(5 + 0x41) == b"A"


def test_the_byte_alphabet_is_a_bijection() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert byte_alphabet()["Ġ"] == 0x20


def test_a_chat_is_rendered_by_the_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat(TemplateInput(messages=[{"role": "user", "content": "hi"}]))
    assert (
        tokenizer.decode(ids, skip_special_tokens=False)
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 257


def test_template_arguments_reach_only_templates_that_read_them(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    given = {"enable_thinking": False, "never_read": 1, "tokenize": False}
    quiet = tokenizer.chat(TemplateInput(messages=messages, template_kwargs=given))
    assert tokenizer.decode(quiet).endswith("no thinking\n")
    loud = TemplateInput(messages=messages, template_kwargs={"enable_thinking": True})
    assert tokenizer.chat(loud) == tokenizer.chat(TemplateInput(messages=messages))


def test_control_tokens_in_content_stay_text_unless_allowed(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    given = TemplateInput(messages=messages)
    clean, raw = tokenizer.chat(given), tokenizer.chat(given, sanitize=False)
    assert (clean.count(258), raw.count(258)) == (1, 2)
    assert tokenizer.decode(clean, skip_special_tokens=False) == tokenizer.decode(
        raw, skip_special_tokens=False
    )


def test_a_final_message_can_be_continued(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, I"}]
    ids = tokenizer.chat(
        TemplateInput(messages=messages, add_generation_prompt=False, continue_final_message=True)
    )
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("well, I")


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "raise"}]])
def test_what_the_template_refuses_is_one_kind_of_error(
    tokenizer: Tokenizer, messages: list[dict[str, str]]
) -> None:
    with pytest.raises(TemplateError):
        tokenizer.chat(TemplateInput(messages=messages))


def test_threads_do_not_disturb_each_other(tokenizer: Tokenizer) -> None:
    """A chat switches special tokens off inside the shared tokenizer; plain texts must not
    notice."""
    wrong = []
    messages = TemplateInput(messages=[{"role": "user", "content": "<|im_end|>" * 50}])
    want = tokenizer.chat(messages)

    def chats() -> None:
        for _ in range(30):
            if tokenizer.chat(messages) != want:
                wrong.append("chat")

    def texts() -> None:
        for _ in range(3000):
            if tokenizer.encode("<|im_end|>") != [258]:
                wrong.append("text")

    threads = [threading.Thread(target=work) for work in (chats, chats, texts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_another_template_can_be_given_as_text_or_file(
    directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    source = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    path = tmp_path / "t.jinja"
    path.write_text(source)
    assert template_text(source) == template_text(str(path)) == source
    tokenizer = Tokenizer.load(directory, str(path))
    assert (
        tokenizer.decode(
            tokenizer.chat(TemplateInput(messages=[{"role": "user", "content": "hi"}]))
        )
        == "hi"
    )
    with pytest.raises(ConfigError, match=r"none\.jinja"):
        template_text(str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match="~nobody-of-this-name"):
        template_text("~nobody-of-this-name/chat.jinja")


def test_a_directory_without_a_tokenizer_is_one_readable_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError) as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_model_without_tokenizer_files_is_refused_with_the_remedy(
    tmp_path: pathlib.Path, family: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 104}))
    with pytest.raises(ConfigError, match=r"--tokenizer.*--skip-tokenizer-init") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"), [("head_dim", 7), ("eos_token_id", "2"), ("model_type", ["qwen3"])]
)
def test_a_fault_of_config_json_is_not_put_down_to_the_tokenizer(
    directory: pathlib.Path, tmp_path: pathlib.Path, key: str, value: object
) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", key: value}))
    with pytest.raises(ConfigError, match=r"^config\.json of ") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value) and "tokenizer" not in str(error.value).lower()


def test_a_syntax_error_of_the_models_own_template_shows_before_the_first_chat(
    directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    Tokenizer.load(tmp_path).check_chat_template()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        path = tmp_path / name
        if not path.exists():
            continue
        if name.endswith("jinja"):
            path.write_text("{% for message in messages %}")
        else:
            settings = json.loads(path.read_text())
            path.write_text(json.dumps(settings | {"chat_template": "{% for m in messages %}"}))
    broken = Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match=r"not valid Jinja \(line 1\).*--chat-template"):
        broken.check_chat_template()
    Tokenizer.load(tmp_path, "{{ messages }}").check_chat_template()


def test_a_template_is_read_from_the_first_file_that_has_one(
    directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    settings = tmp_path / "tokenizer_config.json"
    stored = json.loads(settings.read_text())
    chat = TemplateInput(messages=[{"role": "user", "content": "x"}])

    def rendered() -> str:
        tokenizer = Tokenizer.load(tmp_path)
        tokenizer.check_chat_template()
        return tokenizer.decode(tokenizer.chat(chat))

    (tmp_path / "chat_template.json").write_text('{"chat_template": "last"}')
    settings.write_text(json.dumps(stored | {"chat_template": "middle"}))
    (tmp_path / "chat_template.jinja").write_text("first")
    found = [rendered()]
    (tmp_path / "chat_template.jinja").unlink()
    found.append(rendered())
    del stored["chat_template"]
    settings.write_text(json.dumps(stored))
    found.append(rendered())
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    found.append(rendered())
    assert found == ["first", "middle", "last", "named"]
    assert (
        Tokenizer.load(tmp_path, "{{ 'own' }}").decode(
            Tokenizer.load(tmp_path, "{{ 'own' }}").chat(chat)
        )
        == "own"
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"chat_template": 5}', '{"chat_template": [{}]}'])
def test_a_chat_template_json_without_a_template_is_refused_by_its_name(
    directory: pathlib.Path, tmp_path: pathlib.Path, text: str
) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.json").write_text(text)
    with pytest.raises(ConfigError, match=r"chat_template\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "where", ["{{ messages | nosuch }}", "{% for m in messages %}{{ m|no }}{% endfor %}"]
)
def test_an_unknown_filter_of_a_template_shows_before_the_first_chat(
    directory: pathlib.Path, where: str
) -> None:
    with pytest.raises(ConfigError, match=r"not valid Jinja \(line 1\): No filter named 'no"):
        Tokenizer.load(directory, where)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "tokenizer.json"])
def test_what_is_no_regular_file_is_refused_and_not_opened(
    directory: pathlib.Path, tmp_path: pathlib.Path, name: str, make: Callable[..., None]
) -> None:
    for file in directory.iterdir():
        if file.name != name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} is not a regular file; replace or remove it"):
        Tokenizer.load(tmp_path)


def test_code_in_a_repository_is_never_run(directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')\n")
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError):
        Tokenizer.load(tmp_path)


def test_one_conversation_can_have_a_template_of_its_own(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    source = "{{ messages[0]['content'] }}{% if loud is defined and loud %}!{% endif %}"
    loud = TemplateInput(messages=messages, template_kwargs={"loud": True, "quiet": 1})
    assert tokenizer.decode(tokenizer.chat(loud, chat_template=source)) == "hi!"
    assert "assistant" in tokenizer.decode(tokenizer.chat(TemplateInput(messages=messages)))


@pytest.mark.parametrize("limit", [None, 3, 100])
def test_texts_may_go_without_the_tokenizers_own_tokens(
    directory: pathlib.Path, limit: int | None
) -> None:
    own = Tokenizer.load(directory)
    ends = [("<s>", own.encode("x")[0]), ("</s>", own.encode("y")[0])]
    own.backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    (plain,) = own.encode_all(["abcdef"], limit, special=False)
    (whole,) = own.encode_all(["abcdef"], limit)
    first, last = ends[0][1], ends[1][1]
    assert plain == own.encode("abcdef", add_special_tokens=False)[:limit]
    room = None if limit is None else max(0, limit - 2)
    assert whole == [first, *plain[:room], last]
