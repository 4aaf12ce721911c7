"""Makes the goldens of pooling models: `python tests/goldens/make_pooled.py [case …]`.

Needs torch, transformers, safetensors and numpy, which the tests do not. Each case becomes a folder
of `pooled/` with its JSON files, safetensors and golden.npz: for prompt i its ids and the vector
that transformers and sentence-transformers' modules make of it, or of each of its tokens, before
labels' activation.
"""

from __future__ import annotations

import json
import pathlib
import sys
import zlib
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
from pooled_cases import CASES, PROMPT_LENGTHS  # noqa: E402


def main(names: list[str]) -> None:
    """Write the named cases, or all."""
    for name in names or CASES:
        folder, files = HERE / "pooled" / name, CASES[name]
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(json.dumps(content, indent=2) + "\n")
        torch.manual_seed(zlib.crc32(name.encode()) % 1000)
        model = random_model(folder)
        save_file(tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
        dense = random_dense(folder, files)
        np.savez_compressed(folder / "golden.npz", **run(model, dense, files))
        print(name)


def random_model(folder: pathlib.Path) -> Any:
    """A model whose weights are exact in bfloat16 and whose attention looks at positions."""
    config = AutoConfig.from_pretrained(folder)
    kind = {
        "ForSequenceClassification": AutoModelForSequenceClassification,
        "ForTokenClassification": AutoModelForTokenClassification,
        "ForCausalLM": AutoModelForCausalLM,
    }.get("For" + config.architectures[0].partition("For")[2], AutoModel)
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn_like(parameter) * (0.25 if parameter.ndim > 1 else 0.3)
            values = values + 1 if "norm" in name.lower() and "bias" not in name else values
            parameter.copy_(values.bfloat16().float())
    return model


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """The model's parameters as checkpoints hold them."""
    return {name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters()}


def random_dense(folder: pathlib.Path, files: dict[str, Any]) -> Any:
    """The maps of the dense modules, each with its activation."""
    maps = []
    for path in sorted(path for path in files if "_Dense/" in path):
        config = files[path]
        linear = torch.nn.Linear(config["in_features"], config["out_features"], config["bias"])
        saved = {f"linear.{name}": value.detach() for name, value in linear.named_parameters()}
        save_file(saved, (folder / path).with_name("model.safetensors"), metadata={"format": "pt"})
        activation = config["activation_function"].rpartition(".")[2]
        maps += [linear, getattr(torch.nn, activation)()]
    return torch.nn.Sequential(*maps)


@torch.no_grad()
def run(model: Any, dense: Any, files: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every prompt alone."""
    rng = np.random.default_rng(7)
    golden: dict[str, np.ndarray] = {}
    for index, length in enumerate(PROMPT_LENGTHS):
        prompt = torch.tensor(rng.integers(5, model.config.vocab_size, (1, length)))
        given = {"attention_mask": torch.ones_like(prompt)}
        if model.config.model_type == "bert":
            second = length // 2
            given["token_type_ids"] = (torch.arange(length) >= second).long()[None] * bool(second)
            golden[f"second_{index}"] = np.int32(second)
        out = model(prompt, **given)
        vector = out.logits[0] if hasattr(out, "logits") else pooled(out[0][0], files)
        if tokens := files.get("1_LogitScore/config.json"):
            last = vector[-1]
            vector = (last[tokens["true_token_id"]] - last[tokens["false_token_id"]])[None]
        vector = dense(vector)
        if any(each["type"].endswith("Normalize") for each in files.get("modules.json", [])):
            vector = torch.nn.functional.normalize(vector, dim=0)
        golden[f"prompt_{index}"] = prompt[0].numpy().astype(np.int32)
        golden[f"vector_{index}"] = vector.numpy()
    return golden


def pooled(hidden: torch.Tensor, files: dict[str, Any]) -> torch.Tensor:
    """The pools of 1_Pooling side by side."""
    config = files["1_Pooling/config.json"]
    pools = {
        "cls": lambda: hidden[0],
        "mean": lambda: hidden.mean(0),
        "lasttoken": lambda: hidden[-1],
    }
    given = "lasttoken" if config.get("pooling_mode_lasttoken") else config["pooling_mode"]
    return torch.cat([pools[mode]() for mode in ([given] if isinstance(given, str) else given)])


if __name__ == "__main__":
    main(sys.argv[1:])
