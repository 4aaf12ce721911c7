from jaxllm.server.__main__ import main

raise SystemExit(main())
