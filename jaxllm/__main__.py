"""`python -m jaxllm VERB …` is `jaxllm VERB …`."""

from jaxllm.cli import main

raise SystemExit(main())
