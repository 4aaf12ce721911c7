"""Scripts that let shells complete the `jaxllm` command.

They hold its words, so that completing starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable

from jaxllm.cli.convert import parser as convert_parser
from jaxllm.cli.talk import VERBS as TALKS
from jaxllm.cli.talk import parser as talk_parser
from jaxllm.server.command_line.flags import ACCEPTED_TITLE, parser

SHELLS = ("bash", "zsh", "fish")
SERVES = ("serve", "check")  # the verbs with the server's options


def script(shell: str, verbs: Iterable[str]) -> str:
    """The script of one of SHELLS."""
    if shell == "fish":
        return _fish(verbs)
    begin = ""
    if shell == "zsh":
        begin = "autoload -U +X bashcompinit && bashcompinit\n"
    return begin + _bash(verbs)


def _options() -> dict[tuple[str, ...], list[argparse.Action]]:
    """The options of the verbs that have some, without those for scripts of other servers."""
    parsers = {SERVES: parser(), ("convert",): convert_parser()}
    parsers |= {(verb,): talk_parser(verb) for verb in TALKS}
    return {
        verbs: [
            action
            for group in options._action_groups
            if group.title != ACCEPTED_TITLE
            for action in group._group_actions
            if action.option_strings
        ]
        for verbs, options in parsers.items()
    }


def _bash(verbs: Iterable[str]) -> str:
    cases = "".join(_bash_case(of, actions) for of, actions in _options().items())
    return f"""\
_jaxllm() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {shlex.quote(" ".join(verbs))} -- "$word")); return
  fi
  case ${{COMP_WORDS[1]}} in
{cases}    completion) COMPREPLY=($(compgen -W {shlex.quote(" ".join(SHELLS))} -- "$word"));;
    *) COMPREPLY=($(compgen -f -- "$word"));;
  esac
}}
complete -o filenames -F _jaxllm jaxllm
"""


def _bash_case(verbs: tuple[str, ...], actions: list[argparse.Action]) -> str:
    flags = [flag for action in actions for flag in action.option_strings]
    values = "".join(
        f"        {'|'.join(action.option_strings)}) "
        f"COMPREPLY=($(compgen -W {shlex.quote(' '.join(map(str, action.choices)))} "
        '-- "$word")); return;;\n'
        for action in actions
        if action.choices
    )
    return f"""\
    {"|".join(verbs)})
      case $before in
{values}      esac
      case $word in
        -*) COMPREPLY=($(compgen -W {shlex.quote(" ".join(flags))} -- "$word"));;
        *) COMPREPLY=($(compgen -f -- "$word"));;
      esac;;
"""


def _fish(verbs: Iterable[str]) -> str:
    lines = [f"complete -c jaxllm -n __fish_use_subcommand -f -a {verb}" for verb in verbs]
    for of, actions in _options().items():
        seen = shlex.quote(f"__fish_seen_subcommand_from {' '.join(of)}")
        lines += [_fish_line(seen, action) for action in actions]
    shells = " ".join(SHELLS)
    lines.append(
        "complete -c jaxllm -n '__fish_seen_subcommand_from completion' -f "
        f"-a {shlex.quote(shells)}"
    )
    return "\n".join(lines) + "\n"


def _fish_line(seen: str, action: argparse.Action) -> str:
    names = [f"-l {flag[2:]}" for flag in action.option_strings if flag.startswith("--")]
    takes = ""
    if action.nargs != 0:
        takes = " -r"
    chosen = ""
    if action.choices:
        chosen = f" -f -a {shlex.quote(' '.join(map(str, action.choices)))}"
    help = shlex.quote((action.help or "") % vars(action))
    return f"complete -c jaxllm -n {seen} {' '.join(names)}{takes}{chosen} -d {help}"
