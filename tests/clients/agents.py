"""Coding agents: how each is installed, told of a server, and asked for something."""

from __future__ import annotations

import json
import pathlib
import subprocess
from dataclasses import dataclass
from typing import Any

from tests.clients.environments import npm_install, run

TASK = "Write one into first and two into second."


@dataclass(frozen=True)
class Agent:
    """A coding agent of npm.

    Attributes:
        package: with the version that this was written for.
        setup: what npm runs after an installation where it is allowed to.
        tool: runs a shell command given as `argument`.
    """

    package: str
    tool: str
    argument: str
    setup: str | None = None

    @property
    def name(self) -> str:
        """The package without its version."""
        return self.package.rpartition("@")[0]

    def call(self, command: str) -> tuple[str, dict[str, str]]:
        """The tool call that runs a shell command."""
        arguments = {self.argument: command}
        return self.tool, arguments | ({} if self.argument == "cmd" else {"description": "Write"})

    def install(self, folder: pathlib.Path) -> None:
        """Into a folder of npm."""
        npm_install(folder, self.package)
        if self.setup is not None:
            package = folder / "node_modules" / self.name
            done = run(["node", str(package / self.setup)], cwd=package)
            assert done.returncode == 0, done.stderr

    def ask(self, folder: pathlib.Path, url: str) -> subprocess.CompletedProcess[str]:
        """Give it the task, in the folder `work` and with a home of its own."""
        (folder / "work").mkdir()
        (folder / "home").mkdir()
        (folder / "opencode.json").write_text(json.dumps(opencode_settings(url)))
        binary, *options = COMMANDS[self.name]
        return run(
            [
                str(folder / "node_modules" / ".bin" / binary),
                *(option.replace("URL", url) for option in options),
                TASK,
            ],
            seconds=240,
            cwd=folder / "work",
            HOME=str(folder / "home"),
            PWD=str(folder / "work"),
            OPENAI_API_KEY="none",
            ANTHROPIC_API_KEY="none",
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_MODEL="demo",
            ANTHROPIC_SMALL_FAST_MODEL="demo",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            IS_SANDBOX="1",
            OPENCODE_CONFIG=str(folder / "opencode.json"),
            OPENCODE_DISABLE_AUTOUPDATE="1",
            OPENCODE_DISABLE_MODELS_FETCH="1",
        )


AGENTS = [
    Agent("@openai/codex@0.169.0", "exec_command", "cmd"),
    Agent("@anthropic-ai/claude-code@2.1.197", "Bash", "command", "install.cjs"),
    Agent("opencode-ai@1.18.33", "bash", "command", "postinstall.mjs"),
]
CODEX_PROVIDER = (
    'model_providers.local={name="local",base_url="URL/v1",'
    'env_key="OPENAI_API_KEY",wire_api="responses"}'
)
COMMANDS = {
    "@openai/codex": (
        *("codex", "exec", "-m", "demo", "--skip-git-repo-check"),
        "--dangerously-bypass-approvals-and-sandbox",
        *("-c", "model_provider=local", "-c", CODEX_PROVIDER),
    ),
    "@anthropic-ai/claude-code": ("claude", "--dangerously-skip-permissions", "-p"),
    "opencode-ai": ("opencode", "run"),
}


def opencode_settings(url: str) -> dict[str, Any]:
    """opencode reads its servers from a file."""
    local = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"demo": {"name": "demo"}},
    }
    return {
        "autoupdate": False,
        "share": "disabled",
        "model": "local/demo",
        "small_model": "local/demo",
        "permission": {"*": "allow"},
        "provider": {"local": local},
    }
