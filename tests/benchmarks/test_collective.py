"""A device that leaves out a sum: the program, and what makes a row ok."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import collective, report
from pallas_kernels.all_reduce.cases import Case, expected, inputs
from pallas_kernels.all_reduce.plan import layout_for
from pallas_kernels.all_reduce.trial import are_right


def test_the_program_is_a_sum_of_all_devices_unless_it_is_told_to_leave_one_out():
    case = Case(name="", rows=3, width=256, devices=2)
    mesh = Mesh(np.asarray(jax.devices()[:2]), (collective.AXIS,))
    x, parts, weight = inputs(case)
    layout = layout_for(case.devices, case.rows, 2 * case.width)
    program = collective.leaving(mesh, case, layout, "reference")
    specs = P(), P(collective.AXIS), P(), P(), P(collective.AXIS), P(collective.AXIS)
    none = np.zeros(2, np.int32)
    given = x, parts.reshape(-1, case.width), weight, none[:1], none, none
    placed = (
        jax.device_put(one, NamedSharding(mesh, s)) for one, s in zip(given, specs, strict=True)
    )
    wanted = expected(case, x, parts, weight)
    got = program(*placed)
    assert are_right(got, wanted)
    assert not are_right(got, [wanted[0] + 1.0, wanted[1]])


@pytest.mark.parametrize(
    ("seconds", "told", "right", "ok"),
    [
        (1.1, "0 waited in vain", [True, True], True),
        (2.5, "0 waited in vain", [True, True], False),
        (1.1, "", [True, True], False),
        (1.1, "0 waited in vain", [True, False], False),
    ],
)
def test_a_row_is_ok_when_the_others_gave_up_in_time_and_sums_are_right_again(
    seconds, told, right, ok
):
    assert collective.verdict(seconds, told, right)["ok"] is ok


@pytest.mark.parametrize("gives_up", [True, False])
def test_sums_come_before_and_after_the_one_that_is_left_out(gives_up, monkeypatch):
    """The order of a card's run, with sums of the reference, whose devices never wait in vain."""
    done: list[str] = []
    leaving = collective.leaving

    def check(inboxes: collective.Inboxes) -> None:
        done.append("check")
        if gives_up and done.count("check") == 2:
            raise collective.PeerTimeout("0 waited in vain")

    monkeypatch.setattr(
        collective,
        "leaving",
        lambda mesh, case, layout, backend: leaving(mesh, case, layout, "reference"),
    )
    monkeypatch.setattr(collective.lax, "axis_index", lambda axis: -1)  # nobody is the last one
    monkeypatch.setattr(collective.Inboxes, "check", check)
    for name in ("expect_nobody", "refill"):
        monkeypatch.setattr(collective.Inboxes, name, lambda inboxes, name=name: done.append(name))
    mesh = Mesh(np.asarray(jax.devices()[:2]), (collective.AXIS,))
    (row,) = collective.measure_absent(mesh, [3], [256])
    # The inboxes are made expecting nobody
    assert done == ["expect_nobody"] * 2 + ["refill", "check", "check", "refill", "check"]
    assert (row["absent"], row["right"], row["ok"]) == (1, [True] * 4, gives_up)


def test_records_without_times_are_no_table(tmp_path):
    machine = {"devices": [{"kind": "NVIDIA H200"}] * 2}
    size = {"rows": 1, "width": 4096}
    timed = [size | {"way": "peers", "us": 3.5, "launch_us": 1.0}]
    absent, checked = [size | {"absent": 1, "ok": True}], [size | {"way": "peers", "same": True}]
    for number, figures in enumerate((absent, checked, timed)):
        record = {"benchmark": "collective", "machine": machine, "figures": figures}
        record["arguments"] = {"ways": ["peers"]}
        (tmp_path / f"{number}.json").write_text(json.dumps(record))
    assert report.tables(tmp_path).count("| 1 | 4,096 | 3.5 |") == 1
    assert report.tables(tmp_path).count("| rows | width |") == 1


def test_where_no_kernel_waits_for_peers_nothing_is_left_out(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--devices", "2", "--absent"])
    with pytest.raises(SystemExit, match=r"--absent needs GPUs.*no kernel that stores"):
        collective.main()
