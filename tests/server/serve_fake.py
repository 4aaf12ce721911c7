"""`python -m tests.server.serve_fake …` is `python -m jaxllm.server …` over the fake engine in a
process of its own. STUCK_TOKENIZER=held|released: loading the tokenizer never returns, and holds
Python's lock or not."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

from jaxllm.server.__main__ import main
from jaxllm.tokenizer import Tokenizer
from tests.server.stuck import never_return


def stuck_load(*arguments: Any) -> None:
    """In place of Tokenizer.load; waits until the engine loads, to be stuck beside it."""
    pathlib.Path(os.environ["FAKE_ENGINE_GATE"]).write_bytes(b"")
    print("loading the tokenizer", file=sys.stderr, flush=True)
    never_return(os.environ["STUCK_TOKENIZER"] == "held")


if __name__ == "__main__":
    if "STUCK_TOKENIZER" in os.environ:
        Tokenizer.load = stuck_load  # type: ignore[method-assign, assignment]
    raise SystemExit(main(sys.argv[1:], command=(sys.executable, "-m", "tests.server.fake")))
