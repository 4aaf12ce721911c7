"""Are the step programs those of another commit? A change of how programs are put together changes
no program: lower them all before and after, and compare.

    git worktree add BEFORE COMMIT
    ln -sfn BEFORE sources; PYTHONPATH=sources python lowered_programs.py before/
    ln -sfn AFTER sources; PYTHONPATH=sources python lowered_programs.py after/ --against before/

Texts are equal after names and the order of parameters are made the same: `normalised`. Lowered are
the programs of tiny models, for the CPU and for a Hopper GPU that is not here. Both times the
sources are found at the same path, because kernels hold the names of their files.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import jax

RESULT_NAME = re.compile(r'jax\.result_info = "[^"]*"(, )?')
VALUE = re.compile(r"%[\w#:.]+")
FUNCTION = re.compile(r'@(?:"[^"]*"|[\w.\-]+)')
SIGNATURE = re.compile(r"( *func\.func [^(]*)\((.*?)\)((?: ->| attributes| \{).*)$")
ARGUMENT = re.compile(r"(%arg\d+): (.*?)(?=, %arg\d+: |$)")


def normalised(text: str) -> str:
    """A lowered program without what its names and the order of its parameters say.

    Functions and values are numbered as they are used first, the parameters of a function stand in
    the order of their types, and results have no names. Whether two programs do the same is left:
    another operation, type, sharding or donation is another text.
    """
    text = RESULT_NAME.sub("", text)
    functions: dict[str, str] = {}
    lines = []
    for block in re.split(r"(?=^  func\.func)", text, flags=re.MULTILINE):
        values: dict[str, str] = {}
        signature, _, body = block.partition("\n")
        if signature.startswith("  func.func"):
            body = _renamed(VALUE, body, values, "%")
            signature = _sorted_arguments(signature, values)
            lines.append(_renamed(FUNCTION, signature, functions, "@f"))
        else:
            lines.append(re.sub(r"@[\w.]+", "@module", signature, count=1))
        lines.append(_renamed(FUNCTION, body, functions, "@f"))
    return "\n".join(lines)


def _renamed(pattern: re.Pattern[str], text: str, names: dict[str, str], sign: str) -> str:
    """The text with the names that the pattern finds numbered in their order, after `names`."""
    return pattern.sub(lambda found: names.setdefault(found[0], f"{sign}{len(names)}"), text)


def _sorted_arguments(signature: str, values: dict[str, str]) -> str:
    """The signature with its parameters in the order of their types, by the names of the body."""
    match = SIGNATURE.match(signature)
    if match is None:
        return signature
    head, arguments, tail = match.groups()
    pairs = sorted(
        (kind, values.get(name, "%unused")) for name, kind in ARGUMENT.findall(arguments)
    )
    return f"{head}({', '.join(f'{name}: {kind}' for kind, name in pairs)}){tail}"


def texts() -> Iterator[tuple[str, str]]:
    """A name and the lowered text of each program."""
    from jaxllm.engine.scheduling.buckets import Buckets
    from jaxllm.mesh import WHOLE, Stage, make_mesh
    from tests.engine.conftest import TINY
    from tests.engine.runtime.step_programs import lattice

    real_heads = TINY | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    configs = {
        "dense": real_heads,
        "tied": real_heads | {"tie_word_embeddings": True},
        "mixture": real_heads
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        },
    }
    stages = [WHOLE, Stage(0, 2), Stage(1, 2)]
    targets = [("cpu", "reference"), ("cuda", "mosaic_gpu")]
    buckets = Buckets.build(4, 64, "cpu")
    for (name, config), stage, (platform, backend), shards in itertools.product(
        configs.items(), stages, targets, (1, 4)
    ):
        programs = lattice(
            config,
            make_mesh(shards),
            backend,
            buckets,
            page_size=64,
            pages=512,
            peers=shards > 1 and platform == "cuda",
            stage=stage,
            max_logprobs=5,
        )
        for key in programs.lattice:
            recipe = programs.recipe(key)
            jitted = jax.jit(
                recipe.function,
                donate_argnums=recipe.donated,
                out_shardings=recipe.out,
                keep_unused=True,
            )
            lowered = jitted.trace(*recipe.arguments).lower(lowering_platforms=(platform,))
            sizes = "-".join(map(str, key.sizes))
            place = f"{name}.{stage.index}of{stage.count}.{platform}.{shards}"
            yield f"{place}.{key.program}.{sizes}", lowered.as_text()


def main() -> None:
    """Write the texts to a folder, and compare them with those of another one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    # Kernels hold the places of their code, which move
    jax.config.update("jax_traceback_in_locations_limit", 0)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    names = set()
    for name, text in texts():
        (arguments.folder / f"{name}.mlir").write_text(text)
        names.add(f"{name}.mlir")
    if arguments.against is None:
        return
    sides = (arguments.folder, arguments.against)
    before = {path.name for path in arguments.against.glob("*.mlir")}
    differing = [
        name
        for name in sorted(names & before)
        if len({normalised((side / name).read_text()) for side in sides}) > 1
    ]
    print(f"{len(names & before)} programs compared, {len(differing)} differ", *differing, sep="\n")
    print(f"only before: {sorted(before - names)}, only now: {sorted(names - before)}")
    if differing or before != names:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
