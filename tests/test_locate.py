"""Where a model's files are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from jaxllm.config import ConfigError
from jaxllm.locate import locate


def test_a_hub_model_is_downloaded_without_its_second_set_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(model: str, **arguments: Any) -> str:
        asked.update(arguments, model=model)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate("owner/name", "main", None) == tmp_path
    assert (asked["model"], asked["revision"]) == ("owner/name", "main")
    wanted = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
        "chat_template.jinja",
    ]
    unwanted = [
        "consolidated.safetensors",
        "consolidated.00.pth",
        "original/params.json",
        "original/tokenizer.model",
        "model.bin",
    ]
    patterns = {
        "allow_patterns": asked["allow_patterns"],
        "ignore_patterns": asked["ignore_patterns"],
    }
    assert list(filter_repo_objects(wanted + unwanted, **patterns)) == wanted


def test_directories_are_taken_as_they_are_and_what_is_none_is_refused(tmp_path: Path) -> None:
    assert locate(str(tmp_path)) == tmp_path
    assert (locate("demo") / "config.json").is_file()
    (tmp_path / "file").write_text("")
    for model in (
        str(tmp_path / "absent"),
        str(tmp_path / "file"),
        "./absent",
        "no-slash",
        "~nobody-of-this-name/absent",
    ):
        with pytest.raises(ConfigError):
            locate(model)
