"""The server of the built-in model as a process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import openai

FLAGS = [
    "--host",
    "127.0.0.1",
    "--port",
    "0",
    "--max-num-seqs",
    "4",
    "--max-num-batched-tokens",
    "64",
    "--max-model-len",
    "512",
]


class Demo:
    """`python -m jaxllm.server --model demo`. Subclasses run another module."""

    module: tuple[str, ...] = ("jaxllm.server",)

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", *self.module, "--model", "demo", *FLAGS, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if "serving demo on" in line:
                break
        assert "serving demo on" in self.log, self.log
        self.url = self.log.partition("serving demo on ")[2].partition(" ")[0]
        self._rest = threading.Thread(target=self._read)
        self._rest.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self.log += line

    def scrape(self) -> list[str]:
        """The lines of /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as reply:
            return reply.read().decode().splitlines()

    def metric(self, name: str) -> float:
        """The value of a metric without labels of its own."""
        found = next(line for line in self.scrape() if line.startswith(f"{name}{{"))
        return float(found.rpartition(" ")[2])

    def series(self) -> set[str]:
        """The series of metrics: names with their labels."""
        return {line.rpartition(" ")[0] for line in self.scrape() if not line.startswith("#")}

    def get(self, path: str) -> int:
        """The status of a GET that is answered well."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as reply:
            return reply.status

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that a POST of JSON gets."""
        with urllib.request.urlopen(
            f"{self.url}{path}", json.dumps(body).encode(), timeout=60
        ) as reply:
            return json.load(reply)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        self._rest.join(20)
        return status

    def close(self) -> None:
        """Whatever happened, nothing stays."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._rest.join(20)


def transferring(key: Path, role: str, **extra: Any) -> Demo:
    """A server that computes prompts for others (`kv_producer`) or continues them (`kv_consumer`);
    `key` is a file, `extra` further settings."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    config = {
        "kv_connector": "jaxllm",
        "kv_role": role,
        "kv_port": port,
        "kv_connector_extra_config": {"key_file": str(key)} | extra,
    }
    return Demo("--kv-offloading-size", "0.01", "--kv-transfer-config", json.dumps(config))


def assert_idle(demo: Demo, client: openai.OpenAI) -> None:
    """Nothing runs and no page is held, at the latest after some short requests: each is a round
    trip of the loop that steps take."""
    for _ in range(100):
        if demo.metric("vllm:num_requests_running") == 0:
            break
        client.completions.create(model="demo", prompt="x", max_tokens=1, temperature=0)
    assert demo.metric("vllm:num_requests_running") == 0
    assert demo.metric("vllm:kv_cache_usage_perc") == 0
