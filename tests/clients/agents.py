"""Coding agents: how each is installed, told of a server as docs/clients.md says, and asked."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import subprocess
from dataclasses import dataclass

from tests.clients.agent_server import ROOM
from tests.clients.environments import npm_install, run

TASK = "Write one into first and two into second."
ROOM_SHOWN = "131072"  # tokens of the context on the page
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "clients.md"


@dataclass(frozen=True)
class Agent:
    """A coding agent of npm.

    Attributes:
        package: with the version that this was written for.
        title: of its section in docs/clients.md.
        tool: runs a shell command given as `argument`.
        options: let it act without asking.
        settings: where it looks for what the page says, below its home.
        language: of these settings.
        setup: what npm runs after an installation where it is allowed to.
        room: tokens of a context that the second of two long results does not fit; each has so many
            `rows`.
    """

    package: str
    title: str
    tool: str
    argument: str
    options: tuple[str, ...] = ()
    settings: str | None = None
    language: str = ""
    setup: str | None = None
    room: int = 0
    rows: int = 0

    @property
    def name(self) -> str:
        """The package without its version."""
        return self.package.rpartition("@")[0]

    def call(self, command: str) -> tuple[str, dict[str, str]]:
        """The tool call that runs a shell command."""
        arguments = {self.argument: command}
        return self.tool, arguments | ({} if self.argument == "cmd" else {"description": "Write"})

    def shown(self, language: str, url: str, room: int = ROOM) -> str:
        """What the page shows in this language, for the server at `url` and a context of `room`
        tokens."""
        section = PAGE.read_text().partition(f"## {self.title}\n")[2].partition("\n## ")[0]
        found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
        assert found is not None, (self.title, language)
        shown = found[1].replace("http://localhost:8000", url).replace("\\\n", " ")
        return shown.replace(ROOM_SHOWN, str(room))

    def command(self, url: str, room: int = ROOM) -> tuple[dict[str, str], list[str]]:
        """Variables and words of the page's command, with the task in place of its question."""
        words = shlex.split(self.shown("sh", url, room))
        pairs = [word.split("=", 1) for word in words if re.match("[A-Z_]+=", word)]
        binary, *arguments = words[len(pairs) : -1]
        return dict(pairs), [binary, *arguments, *self.options, TASK]

    def install(self, folder: pathlib.Path) -> None:
        """Into a folder of npm."""
        npm_install(folder, self.package)
        if self.setup is not None:
            package = folder / "node_modules" / self.name
            done = run(["node", str(package / self.setup)], cwd=package)
            assert done.returncode == 0, done.stderr

    def ask(
        self, folder: pathlib.Path, url: str, room: int = ROOM
    ) -> subprocess.CompletedProcess[str]:
        """Give it the task, in the folder `work` and with a home of its own. It is told that the
        context has `room` tokens."""
        home, work = folder / "home", folder / "work"
        for one in (home, work):
            one.mkdir()
        if self.settings is not None:
            path = home / self.settings
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.shown(self.language, url, room))
        variables, (binary, *arguments) = self.command(url, room)
        return run(
            [str(folder / "node_modules" / ".bin" / binary), *arguments],
            seconds=240,
            cwd=work,
            **variables | QUIET,
            HOME=str(home),
            PWD=str(work),
        )


QUIET = {  # nothing is asked of other hosts
    "IS_SANDBOX": "1",
    "OPENCODE_CONFIG_CONTENT": json.dumps(
        {"autoupdate": False, "share": "disabled", "permission": {"*": "allow"}}
    ),
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
AGENTS = [
    Agent(
        "@openai/codex@0.169.0",
        "Codex CLI",
        "exec_command",
        "cmd",
        ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        ".codex/config.toml",
        "toml",
        room=31_000,
        rows=2000,
    ),
    Agent(
        "@anthropic-ai/claude-code@2.1.197",
        "Claude Code",
        "Bash",
        "command",
        ("--dangerously-skip-permissions",),
        setup="install.cjs",
        room=85_000,
        rows=5500,
    ),
    Agent(
        "opencode-ai@1.18.33",
        "opencode",
        "bash",
        "command",
        settings=".config/opencode/opencode.json",
        language="json",
        setup="postinstall.mjs",
        room=32_000,
        rows=2000,
    ),
]
