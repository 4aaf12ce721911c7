"""The rules by which recorded entries of functions become the files on a path."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STEP_SLACK = 4


@dataclass(frozen=True)
class Entry:
    """A function that was entered, or an event of a start.

    Attributes:
        ns: time in nanoseconds, on a clock that all processes share.
        pid: the process.
        thread: the thread of the process.
        phase: what was measured at that time.
        event: "entered"; "spec", the model's description is read; "plan", a plan of memory is made.
        file: path of the source, relative to the checkout.
        function: its qualified name.
        trace: the number of JAX's trace in which it ran; 0 outside traces.
    """

    ns: int
    pid: int
    thread: int
    phase: int
    event: str
    file: str
    function: str
    trace: int

    @property
    def code(self) -> tuple[str, str]:
        """What tells its function from others."""
        return self.file, self.function


def files_of(entries: Iterable[Entry]) -> list[str]:
    """The files whose functions were entered, in order of first entry."""
    return list(dict.fromkeys(entry.file for entry in entries if entry.event == "entered"))


def common(runs: Sequence[Sequence[Entry]]) -> list[str]:
    """The files that every run passes, in the order of the last one: chance adds files (a timer, a
    page that is full), it takes none away."""
    files = [files_of(entries) for entries in runs]
    return [file for file in files[-1] if all(file in others for others in files)]


def added(entries: Sequence[Entry], before: Sequence[Entry]) -> list[Entry]:
    """The entries of functions that did not run before."""
    known = {entry.code for entry in before}
    return [entry for entry in entries if entry.code not in known]


def sizing(entries: Sequence[Entry]) -> list[str]:
    """The files that are passed from the model's description to the last plan of memory, by the
    thread that makes it. Raises ValueError without such a thread."""
    plans = [entry for entry in entries if entry.event == "plan"]
    specs = [entry for entry in entries if entry.event == "spec"]
    threads = {(spec.pid, spec.thread): spec.ns for spec in reversed(specs)}
    for plan in reversed(plans):
        thread = (plan.pid, plan.thread)
        if thread in threads:
            begin = threads[thread]
            return files_of(
                entry
                for entry in entries
                if (entry.pid, entry.thread) == thread and begin < entry.ns <= plan.ns
            )
    raise ValueError("no thread read a model's description and made a plan of memory")


def decode_trace(entries: Sequence[Entry]) -> list[str]:
    """The files of the largest trace: of the programs that a first decode traces, that is the
    decode program. Raises ValueError without a trace."""
    traces: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.trace:
            traces[entry.pid, entry.trace].append(entry)
    if not traces:
        raise ValueError("JAX traced no program")
    return max(map(files_of, traces.values()), key=len)


def steady_step(entries: Sequence[Entry], tokens: int) -> list[str]:
    """The files that every step passes, of a generation of so many tokens by one process.

    A step begins where the function is entered that is the first of those entered once a token. The
    first and the last tenth of the steps are no steady ones. Raises ValueError without such a
    function.
    """
    counts = Counter(entry.code for entry in entries)
    for entry in entries:
        if abs(counts[entry.code] - tokens) <= STEP_SLACK:
            first = entry.code
            break
    else:
        raise ValueError("no function is entered once a token")
    begins = [place for place, entry in enumerate(entries) if entry.code == first]
    margin = len(begins) // 10
    steady = begins[margin : len(begins) - margin]
    ends = steady[1:]
    return common([entries[begin:end] for begin, end in zip(steady, ends, strict=False)])
