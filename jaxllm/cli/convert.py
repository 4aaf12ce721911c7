"""`jaxllm convert`: a checkpoint in another type, or in files of another size."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from jaxllm.config import ConfigError
from jaxllm.server.command_line.server_flags import integer

DTYPES = ("bfloat16", "float16", "float32")


def convert(argv: list[str], environ: Mapping[str, str]) -> int:
    """Write the checkpoint. Returns 1 with the reason when that cannot be."""
    if "--as-served" in argv:
        return _keep([argument for argument in argv if argument != "--as-served"], environ)
    top = parser()
    args, others = top.parse_known_args(argv)
    if others:
        top.error(
            f"unrecognized arguments: {' '.join(others)}; options of serve go with --as-served"
        )
    from jaxllm.locate import locate
    from jaxllm.weights import convert as weights

    try:
        source = locate(args.source, args.revision, None)
        written = weights.convert(source, args.target, args.dtype, args.max_shard_size)
    except ConfigError as error:
        print(f"jaxllm convert: {error}", file=sys.stderr)
        return 1
    print(weights.summary(written, args.target))
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the verb's options. Making it imports no jax."""
    top = argparse.ArgumentParser(
        prog="jaxllm convert",
        description="Write a model's safetensors anew, in another type or in files of another "
        "size. What else belongs to the model is copied.",
        allow_abbrev=False,
    )
    top.add_argument("source", help="a local directory, a hub id, or demo")
    top.add_argument("target", type=Path, help="a directory that is not there yet")
    top.add_argument("--dtype", choices=DTYPES, help="default: each tensor's own")
    top.add_argument(
        "--max-shard-size", type=integer, default=5 << 30, help="bytes of a file (default: 5G)"
    )
    top.add_argument(
        "--as-served",
        action="store_true",
        help="write what a server keeps in --weight-cache-dir, as devices hold it; takes "
        "the options of jaxllm serve, such as --quantization, in place of these",
    )
    top.add_argument("--revision", help="branch, tag or commit of a hub model")
    return top


def _keep(argv: list[str], environ: Mapping[str, str]) -> int:
    """Write an entry of a cache of weights."""
    from jaxllm.engine.startup.weight_source import keep_weights
    from jaxllm.server.command_line.options import parse_models
    from jaxllm.server.lifecycle.serve import find_model

    source, target, *others = argv if len(argv) > 1 else ("", "")
    if not target or source.startswith("-") or target.startswith("-"):
        print("usage: jaxllm convert FROM TO --as-served [OPTIONS OF serve]", file=sys.stderr)
        return 2
    arguments = [source, "--weight-cache-dir", target, *others]
    options, *_ = parse_models(arguments, environ, prog="jaxllm convert")
    try:
        model_dir = find_model(options)
        kept = keep_weights(dataclasses.replace(options.config, model=str(model_dir)))
    except ConfigError as error:
        print(f"jaxllm convert: {error}", file=sys.stderr)
        return 1
    folders = " and ".join(map(str, kept))
    print(f"weights are kept in {folders}; serve with --weight-cache-dir {target}")
    return 0
