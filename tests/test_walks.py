"""The files on a path: what is recorded of a small checkout, and the rules that choose files."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tools.walks.paths import Entry, added, common, decode_trace, files_of, sizing, steady_step
from tools.walks.record import Recording
from tools.walks.tables import DEVICE, HOST, counted, stored, table

SMALL = {
    "jaxllm/__init__.py": "",
    "jaxllm/registry.py": """
        def register(name):
            return name
    """,
    "jaxllm/imported.py": """
        from jaxllm.registry import register
        register("while it is imported")
        class Table:
            size = 3
        def late():
            yield 1
    """,
    "jaxllm/worker.py": """
        def work():
            return 1
    """,
    "jaxllm/child.py": """
        import sys
        def run():
            return 2
        if __name__ == "__main__":
            run()
    """,
    "jaxllm/plans.py": """
        class MemoryPlan:
            pass
        def read_spec():
            return 1
        def fit():
            return MemoryPlan()
    """,
    "main.py": """
        import subprocess, sys, threading
        def foreign():
            pass
        foreign()
        from jaxllm import imported, plans, worker
        thread = threading.Thread(target=worker.work)
        thread.start()
        thread.join()
        plans.read_spec()
        plans.fit()
        subprocess.run([sys.executable, "-m", "jaxllm.child"], check=True)
        list(imported.late())
        worker.work()
    """,
}


def entry(place: int, file: str, function: str = "run", **values: int | str) -> Entry:
    """An entry at time `place`, of one thread unless `values` say otherwise."""
    fields = {"pid": 1, "thread": 1, "phase": 1, "event": "entered", "trace": 0} | values
    return Entry(ns=place, file=file, function=function, **fields)


def entries(files: str) -> list[Entry]:
    """One entry for each letter."""
    return [entry(place, file) for place, file in enumerate(files)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    """What a small checkout records of itself in phase 3."""
    root = tmp_path_factory.mktemp("checkout")
    for name, text in SMALL.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    recording = Recording(root, tmp_path_factory.mktemp("recording"))
    with recording.phase(3):
        command = [sys.executable, "main.py"]
        subprocess.run(command, cwd=root, env=recording.environment, check=True)
    assert recording.entries(2) == []
    return recording.entries(3)


def test_functions_of_all_threads_and_processes_are_recorded_in_order(recorded):
    assert files_of(recorded) == [
        "jaxllm/worker.py",
        "jaxllm/plans.py",
        "jaxllm/child.py",
        "jaxllm/imported.py",
    ]
    assert len({made.pid for made in recorded}) == 2
    assert all(made.pid != os.getpid() for made in recorded)


def test_what_runs_while_a_module_is_imported_is_no_function_that_runs(recorded):
    assert "jaxllm/registry.py" not in files_of(recorded)
    assert {made.function for made in recorded if made.file == "jaxllm/imported.py"} == {"late"}


def test_each_function_is_recorded_once_in_a_phase(recorded):
    entered = [made.code for made in recorded if made.event == "entered"]
    assert len(entered) == len(set(entered))


def test_sizing_lies_between_the_models_description_and_the_last_plan(recorded):
    assert sizing(recorded) == ["jaxllm/plans.py"]
    marks = [
        entry(0, "before"),
        entry(1, "spec", event="spec"),
        entry(2, "a"),
        entry(3, "b", thread=2),
        entry(4, "a"),
        entry(5, "plan", event="plan"),
        entry(6, "c"),
        entry(7, "plan", event="plan"),
        entry(8, "after"),
        entry(9, "plan", event="plan", pid=2),  # a worker's copy
    ]
    assert sizing(marks) == ["a", "c"]
    with pytest.raises(ValueError, match="no thread"):
        sizing(marks[:5])


def test_chance_adds_files_to_a_run_and_takes_none_away():
    assert common([entries("abc"), entries("axbc"), entries("cabay")]) == ["c", "a", "b"]


def test_an_abort_is_what_the_stream_before_did_not_run():
    before = [entry(0, "a"), entry(1, "b")]
    after = [entry(2, "a"), entry(3, "a", "stop"), entry(4, "c")]
    assert files_of(added(after, before)) == ["a", "c"]


def test_a_steady_step_lies_between_entries_of_what_runs_once_a_token():
    steps = ["sabbc", "sabbcx"]  # every other step passes one file more
    run = "begin" + "".join(steps[place % 2] for place in range(40)) + "end"
    assert steady_step(entries(run), 40) == ["s", "a", "b", "c"]
    with pytest.raises(ValueError, match="once a token"):
        steady_step(entries(run), 400)


def test_the_decode_program_is_the_largest_trace():
    made = [
        entry(0, "host"),
        entry(1, "a", trace=1),
        entry(2, "b", trace=2),
        entry(3, "c", trace=2),
    ]
    assert decode_trace(made) == ["b", "c"]
    with pytest.raises(ValueError, match="no program"):
        decode_trace(made[:1])


def test_the_table_says_what_share_of_the_files_is_left():
    before = {name: list("abcdefghij") for name in ("start", "memory sizing", "abort", "chat")}
    before |= {HOST: list("abcde"), DEVICE: list("defgh")}
    now = before | {"abort": list("abcdefg")}
    assert counted(before)["decode step"] == 8
    text = table(before, now)
    assert "| abort | 10 | 7 | 7 | 70% |" in text
    assert "| decode step | 8 | 6 | 8 | 100% |" in text


def test_the_stored_paths_are_complete():
    both = stored()
    assert both.keys() == {"before", "now"}
    assert both["before"].keys() == both["now"].keys()
    assert all(files for paths in both.values() for files in paths.values())
