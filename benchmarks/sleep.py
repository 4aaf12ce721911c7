"""A server that sleeps, wakes up, and takes other weights: seconds, and memory of the device.

    python -m benchmarks.sleep --model shape:qwen2.5-7b --options "--max-model-len 9216"

It starts the server itself. A model with random weights gets a checkpoint to take, of its own shape
in `--directory`, which should be memory: that is what weights are taken from. Other models take
their own. Memory is what `nvidia-smi` says of all GPUs of the machine; null where there are none.
"""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loading import SHARD_BYTES, write_checkpoint
from benchmarks.record import finish, gpus, host, parser
from benchmarks.server import served
from benchmarks.shapes import PREFIX, write

KEY = "operator"
PATIENCE = 600.0  # seconds for one answer
PROMPT = [300, 301, 302, 303]
TOKENS = 8


class Operator:
    """Requests to a server, each timed."""

    def __init__(self, url: str):
        self.url = url
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[float, Any]:
        """Seconds until the answer, and what it is. Raises SystemExit when it is an error."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body or {}).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
        )
        start = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path} answered {error.code}: {error.read()!r:.300}") from None
        return time.perf_counter() - start, json.loads(text) if text else None

    def text(self) -> str:
        """Some greedy tokens, which tell weights apart."""
        return self._complete(TOKENS)[1]["choices"][0]["text"]

    def first_token(self) -> float:
        """Seconds of a request for one token."""
        return self._complete(1)[0]

    def _complete(self, tokens: int) -> tuple[float, Any]:
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
        return self.post("/v1/completions", body)

    def nap(self, level: int) -> dict[str, Any]:
        """Fall asleep, wake up, and answer."""
        before = self.text()
        asleep, _ = self.post(f"/sleep?level={level}")
        memory = memory_used()
        awake, _ = self.post("/wake_up")
        token = self.first_token()
        return {
            "level": level,
            "sleep_s": round(asleep, 3),
            "mib_asleep": memory,
            "wake_up_s": round(awake, 3),
            "wake_up_to_token_s": round(awake + token, 3),
            "same_tokens": self.text() == before,
        }

    def take(self, directory: Path) -> dict[str, Any]:
        """Take the weights of a checkpoint, and answer with them."""
        seconds, _ = self.post("/update_weights", {"path": str(directory)})
        size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        return {
            "update_s": round(seconds, 3),
            "gb_per_s": round(size / seconds / 1e9, 2),
            "token_s": round(self.first_token(), 4),
        }


def memory_used() -> list[int] | None:
    """MiB in use of each GPU of the machine, None where there are none."""
    return [int(mib) for mib in gpus("memory.used")] or None


class Repeated(np.random.Generator):
    """Random bytes of which few are made: 15 GB are written in the time of a copy."""

    SIZE = 2**26

    def bytes(self, length: int) -> bytes:
        """So many, the same ones over and over."""
        block = super().bytes(min(length, self.SIZE))
        return (block * -(-length // len(block)))[:length]


def other_weights(model: str, directory: Path) -> Path:
    """A checkpoint that fits the model."""
    if not model.startswith(PREFIX):
        from jaxllm.locate import locate

        return Path(locate(model))
    written = write(model.removeprefix(PREFIX), directory)
    write_checkpoint(written, SHARD_BYTES, Repeated(np.random.PCG64(1)))
    return written


def main() -> None:
    """Start the server, and have it sleep and take weights."""
    args = parser(__doc__)
    args.set_defaults(model="demo")
    args.add_argument("--options", default="", help="others of the server")
    args.add_argument("--directory", type=Path, help="where a checkpoint is written and removed")
    args.add_argument("--repeat", type=int, default=3)
    a = args.parse_args()
    words = f"{a.model} {a.options} --enable-sleep-mode --admin-key {KEY}"
    with tempfile.TemporaryDirectory(dir=a.directory) as folder:
        weights = other_weights(a.model, Path(folder))
        with served(words, "") as (url, started):
            operator = Operator(url)
            operator.first_token()
            figures: dict[str, Any] = {"start": started, "mib_awake": memory_used()}
            figures["naps"] = [operator.nap(level) for level in (*[1] * a.repeat, 2)]
            figures["updates"] = [operator.take(weights) for _ in range(a.repeat)]
    a.directory = a.directory and "a directory"
    finish("sleep", a, figures, host())


if __name__ == "__main__":
    main()
