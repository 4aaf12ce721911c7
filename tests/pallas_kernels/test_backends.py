"""Back ends by name: imported on first use, chosen by their checks, refused with a reason."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    add_norm,
    draw,
    gated_matmul,
    grouped_matmul,
    int4_matmul,
    latent_decode,
    paged_decode,
    paged_extend,
    rope_write,
)
from pallas_kernels.backends import Backends, UnknownBackend, pools_of, shifted
from pallas_kernels.target import ANYWHERE

PLAIN = "def run(x):\n    return ('plain', x)\n"
PICKY = """
def check(x, y):
    if x != y:
        raise ValueError(f"picky takes equal arguments, got {x} and {y}")

def plan(rows):
    return sorted(rows)

def run(x):
    return ('picky', x)
"""
FAULTY = "def check(*shapes):\n    raise RuntimeError('a bug of the back end')\n"
OPS = {
    "add_norm": add_norm,
    "draw": draw,
    "gated_matmul": gated_matmul,
    "grouped_matmul": grouped_matmul,
    "int4_matmul": int4_matmul,
    "latent_decode": latent_decode,
    "paged_decode": paged_decode,
    "paged_extend": paged_extend,
    "rope_write": rope_write,
}


@pytest.fixture
def op(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backends]:
    """An op of three back ends, in a package of its own that is forgotten afterwards."""
    folder = tmp_path / "some_op"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name, text in (("plain", PLAIN), ("picky", PICKY), ("faulty", FAULTY)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Backends("some_op", "run", dict.fromkeys(("plain", "picky", "faulty"), ANYWHERE))
    for name in [name for name in sys.modules if name.split(".")[0] == "some_op"]:
        del sys.modules[name]


def test_a_back_end_is_the_function_of_its_module(op: Backends) -> None:
    assert op["plain"](3) == ("plain", 3)
    assert op["picky"](3) == ("picky", 3)


def test_a_back_end_is_imported_on_first_use_alone(op: Backends) -> None:
    assert list(op) == ["plain", "picky", "faulty"] and len(op) == 3 and "picky" in op
    assert "some_op.plain" not in sys.modules
    op["plain"]
    assert "some_op.plain" in sys.modules and "some_op.picky" not in sys.modules


def test_a_name_that_is_a_module_but_no_back_end_is_refused(op: Backends) -> None:
    wanted = r"^some_op has no back end '__init__'; choose one of: plain, picky, faulty$"
    with pytest.raises(UnknownBackend, match=wanted):
        op["__init__"]
    assert "__init__" not in op


def test_an_unknown_back_end_is_a_key_error_with_a_readable_message(op: Backends) -> None:
    with pytest.raises(KeyError) as caught:
        op["cuda"]
    assert (
        str(caught.value) == "some_op has no back end 'cuda'; choose one of: plain, picky, faulty"
    )
    assert op.get("plain") is op["plain"]


def test_the_check_of_a_back_end_says_why_it_refuses(op: Backends) -> None:
    op.check("picky", 1, 1)
    with pytest.raises(ValueError, match="picky takes equal arguments, got 1 and 2"):
        op.check("picky", 1, 2)


def test_a_back_end_without_a_check_supports_everything(op: Backends) -> None:
    op.check("plain", "anything", object())
    assert op.supports("plain", "anything", object())


def test_support_is_a_question_that_raises_for_bugs_alone(op: Backends) -> None:
    assert op.supports("picky", 1, 1)
    assert not op.supports("picky", 1, 2)
    assert not op.supports("unknown", 1, 2)
    with pytest.raises(RuntimeError, match="a bug of the back end"):
        op.supports("faulty")


def test_a_planner_is_found_where_there_is_one(op: Backends) -> None:
    planner = op.planner("picky")
    assert planner is not None and planner([3, 1]) == [1, 3]
    assert op.planner("plain") is None
    with pytest.raises(UnknownBackend):
        op.planner("cuda")


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_reference_that_supports_everything_and_loads(name: str) -> None:
    backends = OPS[name].BACKENDS
    assert next(iter(backends)) == "reference"
    assert callable(backends["reference"])
    assert backends.supports("reference", object())


@pytest.mark.parametrize(
    ("name", "backend"), [(name, backend) for name, op in OPS.items() for backend in op.BACKENDS]
)
def test_every_back_end_that_is_named_loads_and_is_callable(name: str, backend: str) -> None:
    assert callable(OPS[name].BACKENDS[backend])


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_page_that_names_its_back_ends(name: str, repo: pathlib.Path) -> None:
    page = (repo / "pallas_kernels" / name / "README.md").read_text()
    assert [backend for backend in OPS[name].BACKENDS if f"`{backend}`" not in page] == []


def test_a_table_is_shifted_by_the_first_page_which_is_used_up() -> None:
    table = jnp.array([[0, 1], [2, 3]], jnp.int32)
    options = {"scale": 1.0, "first_page": jnp.array([10], jnp.int32)}
    assert np.asarray(shifted(table, options)).tolist() == [[10, 11], [12, 13]]  # type: ignore[arg-type]
    assert options == {"scale": 1.0}
    assert shifted(table, options) is table  # type: ignore[arg-type]
    assert shifted(table, {"scale": 1.0, "first_page": None}) is table


def test_pools_have_scales_where_pages_have_them() -> None:
    k, v, scales = jnp.zeros(1), jnp.ones(1), jnp.full(1, 2.0)
    assert pools_of(k, v, {"scale": 1.0}) == (k, v)
    assert pools_of(k, v, {"scale": 1.0, "scales": None}) == (k, v)
    assert pools_of(k, v, {"scale": 1.0, "scales": scales}) == (k, v, scales)
