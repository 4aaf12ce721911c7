"""--help: the groups of options; --help=TOPIC: a group, or what a word is found in."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

ESSENTIAL = (
    "--model --max-model-len --gpu-memory-utilization --max-num-seqs --tensor-parallel-size "
    "--host --port --served-model-name --api-key --config"
).split()


def help_text(top: argparse.ArgumentParser, topic: str) -> str:
    """The help on a topic: "" for the overview, all, a group's title, or a word."""
    if topic.lower() == "all":
        return top.format_help()
    if not topic:
        return _page(top, [("Most used", _named(top, ESSENTIAL))]) + _overview(top)
    for title, actions in _groups(top):
        if title.lower().startswith(topic.lower()):
            return _page(top, [(title, actions)])
    word = topic.lower().lstrip("-")
    matches = [
        (title, [action for action in actions if _mentions(action, word)])
        for title, actions in _groups(top)
    ]
    if not any(actions for _, actions in matches):
        return f"no option mentions {topic!r}; {_topics(top)}\n"
    return _page(top, [(title, actions) for title, actions in matches if actions])


def _groups(top: argparse.ArgumentParser) -> Iterable[tuple[str, list[argparse.Action]]]:
    """Titles and options of the groups."""
    for group in top._action_groups:
        if group._group_actions and group.title:
            yield group.title, group._group_actions


def _named(top: argparse.ArgumentParser, flags: Sequence[str]) -> list[argparse.Action]:
    return [top._option_string_actions[flag] for flag in flags]


def _mentions(action: argparse.Action, word: str) -> bool:
    text = " ".join([*action.option_strings, action.help or ""]).lower()
    return word in text or word.replace("_", "-") in text


def _page(
    top: argparse.ArgumentParser, sections: Sequence[tuple[str, list[argparse.Action]]]
) -> str:
    formatter = top._get_formatter()
    formatter.add_usage(top.usage, [], [])
    for title, actions in sections:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _overview(top: argparse.ArgumentParser) -> str:
    lines = [
        f"  --help={title.split()[0]:<14}{len(actions)} options" for title, actions in _groups(top)
    ]
    return "\n".join(["", "Groups:", *lines, "", *_endings()])


def _topics(top: argparse.ArgumentParser) -> str:
    titles = ", ".join(title.split()[0] for title, _ in _groups(top))
    return f"groups are {titles}"


def _endings() -> list[str]:
    return [
        "  --help=all           every option",
        "  --help=WORD          options that mention it",
        "  --help=sampling      the sampling options of requests",
        "",
    ]
