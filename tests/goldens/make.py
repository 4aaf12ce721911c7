"""Makes the goldens: tiny random checkpoints and what transformers computes with them in float32.

Needs torch, transformers, safetensors and numpy, which the tests do not: `python
tests/goldens/make.py [case …]`. Each case becomes a folder with config.json, safetensors and
golden.npz: for prompt i its ids, its greedy continuation, the log-probabilities of the prompt's own
tokens, and the whole distribution at every generated position.
"""

from __future__ import annotations

import copy
import json
import pathlib
import sys
import tempfile
import zlib
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.goldens.cases import CASES, NEW_TOKENS, PROMPT_LENGTHS  # noqa: E402
from tests.goldens.remote_cases import equivalent, published  # noqa: E402

MIN_MARGIN = 5e-3  # between the two likeliest tokens: rounding must not decide a greedy token


def main(names: list[str]) -> None:
    """Write the named cases, or all."""
    for name in names or CASES:
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CASES[name], indent=2) + "\n")
        for seed in range(zlib.crc32(name.encode()) % 1000, 10**6, 1000):
            model = random_model(folder, seed)
            golden, margin = run(model, seed)
            if margin > MIN_MARGIN:
                break
        save(folder, model)
        np.savez_compressed(folder / "golden.npz", **golden)
        print(
            f"{name}: seed {seed}, smallest margin {margin:.4f}, "
            f"{len(set(golden['greedy_3'].tolist()))} distinct tokens"
        )


def random_model(folder: pathlib.Path, seed: int) -> Any:
    """A model whose logits vary and whose attention looks at positions; weights are exact in
    bfloat16.
    """
    torch.manual_seed(seed)
    sees = "vision_config" in CASES[folder.name]
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    # transformers adds ALiBi twice in its eager attention
    how = "sdpa" if CASES[folder.name].get("alibi") else "eager"
    model = kind.from_config(_config(folder), attn_implementation=how).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn_like(parameter) * (0.25 if parameter.ndim > 1 else 0.3)
            norm = parameter.ndim == 1 and name.endswith("weight")
            values = values + 1 if norm else values
            parameter.copy_(values.bfloat16().float())
        for name, buffer in model.named_buffers():
            if "correction" in name:  # as large as scores differ
                buffer.copy_((torch.randn_like(buffer) * 0.25).bfloat16().float())
    return model


def _config(folder: pathlib.Path) -> Any:
    other = equivalent(folder.name)
    return AutoConfig.from_pretrained(folder) if other is None else AutoConfig.for_model(**other)


@torch.no_grad()
def run(model: Any, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """Every prompt through a fresh copy (dynamic RoPE remembers the longest sequence), greedily."""
    rng = np.random.default_rng(seed)
    golden: dict[str, np.ndarray] = {}
    margin = float("inf")
    for index, length in enumerate(PROMPT_LENGTHS):
        fresh = copy.deepcopy(model)
        prompt = torch.tensor(
            rng.integers(3, model.config.get_text_config().vocab_size, (1, length))
        )
        out = fresh(prompt, use_cache=True)
        inside = torch.log_softmax(out.logits[0, :-1], -1)
        golden[f"prompt_{index}"] = prompt[0].numpy().astype(np.int32)
        golden[f"prompt_logprobs_{index}"] = inside.gather(1, prompt[0, 1:, None])[:, 0].numpy()
        rows, tokens = [], []
        for _ in range(NEW_TOKENS):
            row = torch.log_softmax(out.logits[0, -1], -1)
            first, second = row.topk(2).values
            margin = min(margin, float(first - second))
            rows.append(row.numpy())
            tokens.append(int(row.argmax()))
            out = fresh(
                torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True
            )
        golden[f"greedy_{index}"] = np.array(tokens, np.int32)
        golden[f"greedy_logprobs_{index}"] = np.stack(rows)
    return golden, margin


def stored(model: Any, fused: bool) -> dict[str, torch.Tensor]:
    """The tensors as checkpoints hold them: with one for each expert, or one for all."""
    if fused:
        return model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(pathlib.Path(folder) / "model.safetensors")


def save(folder: pathlib.Path, model: Any) -> None:
    """One safetensors file, or two with an index for the case that says so; bfloat16 unless the
    configuration says float32."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    single = CASES[folder.name].get("torch_dtype") == "float32"
    tensors = {
        name: (p if single else p.bfloat16()).detach().contiguous()
        for name, p in published(folder.name, stored(model, "-fused" in folder.name)).items()
    }
    if not folder.name.endswith("-sharded"):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = {
        "model-00001-of-00002.safetensors": list(tensors)[::2],
        "model-00002-of-00002.safetensors": list(tensors)[1::2],
    }
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
