"""Trains the demo model and writes its Hugging Face directory.

python -m examples.demo_model.train --out build/demo --seconds 400    # minutes on a data-centre GPU
python -m examples.demo_model.train --out build/tiny --tiny     # seconds on a CPU, learns little
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

from examples.demo_model import tokenizer
from examples.demo_model.network import CONFIG, TINY, can_fuse, create, forward, load, save
from examples.demo_model.pack import Rows, pack
from examples.demo_model.tokenizer import CONTROL, VOCABULARY
from jaxllm.nn.contexts.rows import PlainRows

COLUMNS = ("token_NT", "segment_NT", "position_NT", "learn_NT")
IN_FLIGHT = 4  # steps that the host may be ahead of the device


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result, besides the code and the data generator.

    Attributes:
        steps: updates at most.
        seconds: of training at most, from the first step. The learning rate decays by steps or by
            seconds, whichever end is nearer, so a run that time ends is a whole one.
        tokens: of one step, padding included.
        lengths: of rows, in tokens; a step has rows of one length.
        start: a model's directory whose weights are trained on; "" for fresh ones.
        floor: the last learning rate, as a part of the greatest.
    """

    steps: int = 16_000
    seconds: float = math.inf
    tokens: int = 65_536
    lengths: tuple[int, ...] = (512, 1024, 2048)
    documents: int = 1_200_000
    workers: int = 16
    rate: float = 2e-3
    warmup: int = 300
    decay: float = 0.1
    floor: float = 0.01
    seed: int = 0
    start: str = ""

    def rows_of(self, length: int) -> int:
        """Rows of this length in a step."""
        return max(1, self.tokens // length)

    def rate_at(self, step: int, seconds: float) -> float:
        """Learning rate: linear warm-up, then a cosine."""
        progress = min(1.0, max(step / self.steps, seconds / self.seconds))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        warm = min(1.0, (step + 1) / max(1, min(self.warmup, self.steps // 5)))
        return self.rate * warm * (self.floor + (1 - self.floor) * cosine)


TINY_RECIPE = Recipe(
    steps=30, tokens=512, lengths=(128, 256), documents=400, workers=1, warmup=5, rate=1e-2
)
Step = Callable[..., tuple[nnx.State, optax.OptState, jax.Array]]


def loss_of(graph: nnx.GraphDef, state: nnx.State, rows: Rows) -> jax.Array:
    """Mean cross-entropy (nats) of the tokens to learn, computed in bfloat16 with float32
    logits."""
    model = nnx.merge(graph, jax.tree.map(lambda value: value.astype(jnp.bfloat16), state))
    hidden_BTD = forward(
        model, rows.token_NT, rows.position_NT, rows.segment_NT, can_fuse(jnp.bfloat16)
    )
    logits = partial(model.logits, context=PlainRows())
    logits_BTV = jax.vmap(logits)(hidden_BTD[:, :-1])
    same_BT = rows.segment_NT[:, 1:] == rows.segment_NT[:, :-1]
    weight_BT = (rows.learn_NT[:, 1:] & same_BT).astype(jnp.float32)
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, rows.token_NT[:, 1:])
    return (loss_BT * weight_BT).sum() / jnp.maximum(weight_BT.sum(), 1.0)


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW with clipping, before the learning rate; norms and other vectors are not decayed."""
    matrices = lambda state: jax.tree.map(lambda value: value.ndim > 1, state)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(recipe.decay, mask=matrices),
    )


def make_step(graph: nnx.GraphDef, tx: optax.GradientTransformation) -> Step:
    """One update on the rows of a step."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(
        state: nnx.State,
        moments: optax.OptState,
        rate: jax.Array,
        columns: tuple[jax.Array, ...],
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        token, segment, position, learn = columns
        rows = Rows(
            token.astype(jnp.int32), segment.astype(jnp.int32), position.astype(jnp.int32), learn
        )
        loss, gradient = jax.value_and_grad(lambda state: loss_of(graph, state, rows))(state)
        change, moments = tx.update(gradient, moments, state)
        change = jax.tree.map(lambda value: -rate * value, change)
        return optax.apply_updates(state, change), moments, loss

    return update


def compile_steps(
    step: Any, state: nnx.State, moments: optax.OptState, recipe: Recipe
) -> dict[int, Step]:
    """The update for rows of each length, compiled."""
    programs = {}
    for length in recipe.lengths:
        shape = (recipe.rows_of(length), length)
        columns = tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in (*(jnp.int16,) * 3, bool))
        programs[length] = step.lower(state, moments, np.float32(0), columns).compile()
    return programs


def batches(data: list[Rows], recipe: Recipe) -> Iterator[tuple[jax.Array, ...]]:
    """The columns of each step's rows. Every pass over the rows is shuffled anew, its steps of all
    lengths too; what fills no step waits for the next pass."""
    rng, left = np.random.default_rng(recipe.seed), recipe.steps
    while left > 0:
        steps: list[tuple[Rows, np.ndarray]] = []
        for rows in data:
            count, length = rows.token_NT.shape
            size, order = recipe.rows_of(length), rng.permutation(count)
            if 0 < count < size:
                order = np.resize(order, size)
            order = order[: len(order) // size * size]
            steps += [(rows, index_B) for index_B in order.reshape(-1, size)]
        for at in rng.permutation(len(steps))[:left]:
            rows, index_B = steps[at]
            yield tuple(jnp.asarray(getattr(rows, name)[index_B]) for name in COLUMNS)
        left -= len(steps)


def train(
    hf: dict[str, Any],
    recipe: Recipe,
    rows: Callable[[], list[Rows]],
    report: Callable[[str], None] = print,
) -> tuple[nnx.Module, list[float]]:
    """The trained model (float32) and the loss of every step. `rows` is asked once everything is
    compiled; then the time begins."""
    model = load(Path(recipe.start)) if recipe.start else create(hf, recipe.seed)
    graph, state = nnx.split(model)
    tx = optimizer(recipe)
    moments = tx.init(state)
    programs = compile_steps(make_step(graph, tx), state, moments, recipe)
    data = rows()
    losses: list[jax.Array] = []
    begin = time.perf_counter()
    for i, columns in enumerate(batches(data, recipe)):
        seconds = time.perf_counter() - begin
        if losses and seconds > recipe.seconds:
            break
        rate = np.float32(recipe.rate_at(i, seconds))
        state, moments, loss = programs[columns[0].shape[1]](state, moments, rate, columns)
        losses.append(loss)
        if i >= IN_FLIGHT:
            losses[i - IN_FLIGHT].block_until_ready()
        if i in (0, 10) or (i + 1) % 250 == 0:
            mean = float(jnp.stack(losses[-50:]).mean())
            report(f"step {i + 1}: loss {mean:.4f}, rate {rate:.2e}, {seconds:.1f} s")
    report(f"{len(losses)} steps, {time.perf_counter() - begin:.1f} s")
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


def record_of(recipe: Recipe, data: list[Rows], losses: list[float]) -> dict[str, Any]:
    """What the card says of the training; seconds are added by who measures them."""
    shown = asdict(recipe) | {"steps": len(losses)}
    if math.isinf(recipe.seconds):
        shown["seconds"] = None
    return {
        "recipe": shown,
        "tokens": sum(int((rows.segment_NT > 0).sum()) for rows in data),
        "learnt_tokens": sum(int(rows.learn_NT.sum()) for rows in data),
        "first_loss": losses[0],
        "last_loss": float(np.mean(losses[-50:])),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def run(
    tokenizer_file: Path, recipe: Recipe, hf: dict[str, Any]
) -> tuple[nnx.Module, list[float], list[Rows]]:
    """The trained model, its losses and its text, which is packed while the steps compile."""
    report, begin = partial(print, flush=True), time.perf_counter()

    def packed() -> list[Rows]:
        data = pack(
            tokenizer_file, recipe.documents, recipe.lengths, recipe.seed + 1, recipe.workers
        )
        rows = ", ".join(f"{len(one.token_NT)} rows of {one.token_NT.shape[1]}" for one in data)
        report(f"{rows}: {time.perf_counter() - begin:.1f} s")
        return data

    with ThreadPoolExecutor(1) as thread:
        data = thread.submit(packed)
        model, losses = train(hf, recipe, data.result, report)
    return model, losses, data.result()


def chosen_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe with what the command line changes of it."""
    names = ("steps", "seconds", "documents", "workers", "rate", "start")
    chosen = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return replace(TINY_RECIPE if arguments.tiny else Recipe(), **chosen)


def main() -> None:
    """Pack, train, export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("jaxllm/demo/tokenizer.json"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--start", help="a model's directory to train on from")
    for name in ("steps", "documents", "workers"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("seconds", "rate"):
        parser.add_argument(f"--{name}", type=float)
    arguments = parser.parse_args()
    recipe = chosen_recipe(arguments)
    hf = TINY if arguments.tiny else CONFIG
    begin = time.perf_counter()
    model, losses, data = run(arguments.tokenizer, recipe, hf)
    export(arguments.out, hf, model)
    tokenizer.write(arguments.out, Tokenizer.from_file(str(arguments.tokenizer)))
    record = record_of(recipe, data, losses)
    record["seconds"] = round(time.perf_counter() - begin)
    (arguments.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
