"""Tables of recorded results."""

from __future__ import annotations

from benchmarks import report


def test_a_row_says_with_which_options_a_model_ran():
    arguments = {"model": "shape:tiny", "max_num_seqs": 400}
    options = {"quantization": "fp8", "max_model_len": 2048}
    machine = {"devices": [{"kind": "NVIDIA H200"}]}
    records = [
        {"arguments": arguments | more, "machine": machine, "figures": {"num_requests": 7}}
        for more in ({}, {"options": options, "max_num_seqs": None})
    ]
    first, second = report.table("throughput", records).splitlines()[-2:]
    assert first.startswith("| shape:tiny, max_num_seqs 400 | NVIDIA H200 | 7 | – |")
    assert second.startswith("| shape:tiny, quantization fp8 | NVIDIA H200 | 7 |")
