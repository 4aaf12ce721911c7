"""Trains the demo model and writes `config.json`, `generation_config.json` and `model.safetensors`.

python -m examples.demo_model.train --out build/demo            # the packaged model: minutes on a
data-centre GPU python -m examples.demo_model.train --out build/tiny --tiny     # seconds on a CPU,
learns next to nothing
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.demo_model.network import CONFIG, TINY, can_fuse, create, forward, save
from examples.demo_model.pack import Rows, pack
from examples.demo_model.tokenizer import CONTROL, VOCABULARY


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result, besides the code and the data generator."""

    steps: int = 7_100
    batch: int = 64  # rows a step
    length: int = 1024  # tokens a row
    documents: int = 1_000_000
    workers: int = 16
    rate: float = 2e-3
    warmup: int = 300
    decay: float = 0.1
    seed: int = 0


TINY_RECIPE = Recipe(steps=30, batch=4, length=128, documents=400, workers=1, warmup=5)
Step = Callable[[nnx.State, optax.OptState, jax.Array], tuple[nnx.State, optax.OptState, jax.Array]]


def loss_of(graph: nnx.GraphDef, state: nnx.State, rows: Rows) -> jax.Array:
    """Mean cross-entropy (nats) of the tokens to learn, computed in bfloat16 with float32
    logits."""
    model = nnx.merge(graph, jax.tree.map(lambda value: value.astype(jnp.bfloat16), state))
    hidden_BTD = forward(
        model, rows.token_NT, rows.position_NT, rows.segment_NT, can_fuse(jnp.bfloat16)
    )
    logits_BTV = jax.vmap(model.logits)(hidden_BTD[:, :-1])
    same_BT = rows.segment_NT[:, 1:] == rows.segment_NT[:, :-1]
    weight_BT = (rows.learn_NT[:, 1:] & same_BT).astype(jnp.float32)
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, rows.token_NT[:, 1:])
    return (loss_BT * weight_BT).sum() / jnp.maximum(weight_BT.sum(), 1.0)


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW with clipping, linear warm-up and cosine decay; norms and other vectors are not
    decayed."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, recipe.rate, min(recipe.warmup, recipe.steps // 5), recipe.steps, recipe.rate * 0.01
    )
    matrices = lambda state: jax.tree.map(lambda value: value.ndim > 1, state)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=recipe.decay, mask=matrices),
    )


def make_step(graph: nnx.GraphDef, tx: optax.GradientTransformation, data: Rows) -> Step:
    """One compiled update on the rows of `data` (on the device) whose indices it is given."""
    held = tuple(
        jnp.asarray(column)
        for column in (data.token_NT, data.segment_NT, data.position_NT, data.learn_NT)
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(
        state: nnx.State,
        moments: optax.OptState,
        index_B: jax.Array,
        columns: tuple[jax.Array, ...],
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        token, segment, position, learn = (column[index_B] for column in columns)
        rows = Rows(
            token.astype(jnp.int32), segment.astype(jnp.int32), position.astype(jnp.int32), learn
        )
        loss, gradient = jax.value_and_grad(lambda state: loss_of(graph, state, rows))(state)
        change, moments = tx.update(gradient, moments, state)
        return optax.apply_updates(state, change), moments, loss

    return lambda state, moments, index_B: update(state, moments, index_B, held)


def batches(rows: int, recipe: Recipe) -> np.ndarray:
    """`[steps, batch]` row indices: as many shuffled passes over the rows as the steps need."""
    rng, need = np.random.default_rng(recipe.seed), recipe.steps * recipe.batch
    order = np.concatenate([rng.permutation(rows) for _ in range(-(-need // rows))])
    return order[:need].reshape(recipe.steps, recipe.batch)


def train(
    hf: dict[str, Any], recipe: Recipe, data: Rows, report: Callable[[str], None] = print
) -> tuple[nnx.Module, list[float]]:
    """The trained model (float32) and the loss of every step."""
    graph, state = nnx.split(create(hf, recipe.seed))
    tx = optimizer(recipe)
    moments, step = tx.init(state), make_step(graph, tx, data)
    losses: list[jax.Array] = []
    begin = time.perf_counter()
    for i, index_B in enumerate(batches(len(data.token_NT), recipe)):
        state, moments, loss = step(state, moments, jnp.asarray(index_B))
        losses.append(loss)
        if i in (0, 10) or (i + 1) % 250 == 0 or i + 1 == recipe.steps:
            report(
                f"step {i + 1} of {recipe.steps}: loss {float(loss):.4f}, "
                f"{time.perf_counter() - begin:.1f} s"
            )
    return nnx.merge(graph, state), [float(loss) for loss in losses]


def export(folder: Path, hf: dict[str, Any], model: nnx.Module) -> None:
    """Write the model's part of a Hugging Face directory."""
    end, stop = VOCABULARY - len(CONTROL) - 6, hf["eos_token_id"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    generation = {
        "bos_token_id": None,
        "eos_token_id": [stop, end],
        "pad_token_id": end,
        "do_sample": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save(model, hf, folder / "model.safetensors")


def main() -> None:
    """Pack, train, export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("jaxllm/demo/tokenizer.json"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--documents", type=int)
    parser.add_argument("--workers", type=int)
    arguments = parser.parse_args()
    chosen = {
        key: value
        for key in ("steps", "documents", "workers")
        if (value := getattr(arguments, key)) is not None
    }
    recipe = replace(TINY_RECIPE if arguments.tiny else Recipe(), **chosen)
    hf = TINY if arguments.tiny else CONFIG
    begin = time.perf_counter()
    data = pack(
        arguments.tokenizer, recipe.documents, recipe.length, recipe.seed + 1, recipe.workers
    )
    filled, learnt = int((data.segment_NT > 0).sum()), int(data.learn_NT.sum())
    print(
        f"{len(data.token_NT)} rows of {recipe.length}: {filled} tokens, {learnt} learnt, "
        f"{time.perf_counter() - begin:.1f} s",
        flush=True,
    )
    model, losses = train(hf, recipe, data, partial(print, flush=True))
    export(arguments.out, hf, model)
    record = {
        "recipe": asdict(recipe),
        "tokens": filled,
        "learnt_tokens": learnt,
        "first_loss": losses[0],
        "last_loss": float(np.mean(losses[-50:])),
    }
    record |= {
        "seconds": round(time.perf_counter() - begin),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    (arguments.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
