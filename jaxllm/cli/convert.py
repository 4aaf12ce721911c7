"""`jaxllm convert`: a checkpoint in another type, or in files of another size."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxllm.config import ConfigError
from jaxllm.server.command_line.server_flags import integer


def convert(argv: list[str]) -> int:
    """Write the checkpoint. Returns 1 with the reason when that cannot be."""
    from jaxllm.locate import locate
    from jaxllm.weights import convert as weights

    parser = argparse.ArgumentParser(
        prog="jaxllm convert",
        description="Write a model's safetensors anew, in another type or in files of another "
        "size. What else belongs to the model is copied.",
        allow_abbrev=False,
    )
    parser.add_argument("source", help="a local directory, a hub id, or demo")
    parser.add_argument("target", type=Path, help="a directory that is not there yet")
    parser.add_argument("--dtype", choices=weights.DTYPES, help="default: each tensor's own")
    parser.add_argument(
        "--max-shard-size", type=integer, default=5 << 30, help="bytes of a file (default: 5G)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    args = parser.parse_args(argv)
    try:
        source = locate(args.source, args.revision, None)
        written = weights.convert(source, args.target, args.dtype, args.max_shard_size)
    except ConfigError as error:
        print(f"jaxllm convert: {error}", file=sys.stderr)
        return 1
    print(weights.summary(written, args.target))
    return 0
