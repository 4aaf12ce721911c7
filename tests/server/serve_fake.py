"""`python -m tests.server.serve_fake …` is `python -m jaxllm.server …` over the fake engine in a
process of its own."""

from __future__ import annotations

import sys

from jaxllm.server.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], command=(sys.executable, "-m", "tests.server.fake")))
