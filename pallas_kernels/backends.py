"""Back ends of an op by name: which serves a target, and what it supports. They are imported on
first use. Also the options that attention ops share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Required, TypedDict

import jax
from jax import Array

from pallas_kernels.target import ANYWHERE, Needs, Target


def named(widths: tuple[int, ...]) -> str:
    """The widths in an error: 64, 128 or 256."""
    return f"{', '.join(map(str, widths[:-1]))} or {widths[-1]}"


class AttentionOptions(TypedDict, total=False):
    """How attention ops score: `softcap` s maps x to s·tanh(x / s), `window` w hides keys w or more
    positions back; None = neither.

    `sinks` is a float32 `[N]`: one logit per query head that joins the softmax's denominator and
    has no value, in natural-log units, after scale and softcap; None = no such logit.
    """

    scale: Required[float]
    window: int | None
    softcap: float | None
    sinks: Array | None
    scales: Array | None  # of pages in 8 bits; see `paged_decode.decode_attention`
    # Int32 [1], what is added to page numbers: where a layer begins in a pool of several; None = 0
    first_page: Array | None
    # For back ends that plan: no row is split between thread blocks, so that its result does not
    # depend on the other rows
    no_split: bool
    # The back end's plan of the same rows; without one, the back end plans each call
    plan: Any


def open_plan(plan: Any) -> Any:
    """The plan with its flags in a buffer that calls of this trace write in place, and so the plans
    in a tuple; what has no flags stays as it is.

    Thread blocks signal each other by flags in the plan's `splits_SF`, which a kernel therefore
    aliases to an output. Flags are zero again at the end of a call, so the calls of a step pass one
    buffer on: open the plan, call the op, and hand `close_plan` of it to the next layer. That costs
    neither a launch nor a copy. A call that gets arrays instead writes to a copy of them.
    """
    return _with_flags(plan, jax.new_ref)


def close_plan(plan: Any) -> Any:
    """The arrays of an open plan after the calls so far."""
    return _with_flags(plan, lambda splits_SF: splits_SF[...])


def _with_flags(plan: Any, change: Callable[[Any], Any]) -> Any:
    """The plan with its flags changed, and those of the plans in it."""
    if hasattr(plan, "splits_SF"):
        return plan._replace(splits_SF=change(plan.splits_SF))
    if not isinstance(plan, tuple):
        return plan
    parts = [_with_flags(part, change) for part in plan]
    if hasattr(plan, "_make"):
        return plan._make(parts)
    return tuple(parts)


def shifted(table: Array, options: AttentionOptions) -> Array:
    """The page table with `first_page` added, for back ends that do not add it themselves."""
    first = options.pop("first_page", None)
    return table if first is None else table + first


def pools_of(k_pages: Array, v_pages: Array, options: AttentionOptions) -> tuple[Array, ...]:
    """Pages of keys and of values, then their scales where pages have scales."""
    scales = options.get("scales")
    if scales is None:
        return (k_pages, v_pages)
    return (k_pages, v_pages, scales)


class UnknownBackend(KeyError):
    """The op has no back end of that name; the message lists the existing ones."""

    def __str__(self) -> str:
        return str(self.args[0])


class Backends(Mapping[str, Callable[..., Any]]):
    """The back ends of one op: name → callable.

    Back end `name` is the module `package.name`, which defines `function`. The op's table says what
    each needs of a target, so that nothing is imported that cannot run. It begins with what runs
    everywhere; of several that serve, the last is chosen. A module may also define:

    - `check(*shapes)`, which raises ValueError for shapes and types that it does not support;
    - `prefers(target, *shapes)`: whether it is worth choosing for shapes that it supports;
    - `plan(...)`: see `planner`; and facts of its op, see `fact`.

    Attributes:
        needs: What each back end needs of a target.
    """

    def __init__(self, package: str, function: str, needs: Mapping[str, Needs]):
        self.needs = dict(needs)
        self._package = package
        self._function = function

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return getattr(self._module(name), self._function)

    def suited(self, target: Target) -> list[str]:
        """The back ends that run on a target, the first choice first."""
        return [name for name in reversed(self.needs) if self.needs[name].met_by(target)]

    def find(self, target: Target, *shapes: Any) -> str | None:
        """The back end for arrays of these shapes and types on a target; None where none of those
        that support them is worth it, and the caller does it in its own way."""
        for name in self.suited(target):
            if self.prefers(name, target, *shapes) and self.supports(name, *shapes):
                return name
        return None

    def choose(self, target: Target, *shapes: Any) -> str:
        """`find` for an op whose reference takes everything. Raises ValueError where none
        serves."""
        name = self.find(target, *shapes)
        if name is None:
            raise ValueError(f"{self._op} has no back end for these arrays on {target.title}")
        return name

    def prefers(self, name: str, target: Target, *shapes: Any) -> bool:
        """Whether a back end that supports these shapes is worth choosing for them on a target."""
        return self.fact(name, "prefers", _always)(target, *shapes)

    def check(self, name: str, *shapes: Any) -> None:
        """Raise ValueError, with the reason, if a back end does not support arrays of these shapes
        and types."""
        self.fact(name, "check", _always)(*shapes)

    def supports(self, name: str, *shapes: Any) -> bool:
        """Whether a back end of that name exists and supports arrays of these shapes and types."""
        if name not in self:
            return False
        try:
            self.check(name, *shapes)
        except ValueError:
            return False
        return True

    def runs_anywhere(self, name: str) -> bool:
        """Whether a back end needs nothing of a target: it is plain JAX."""
        return self.needs[name] == ANYWHERE

    def planner(self, name: str) -> Callable[..., Any] | None:
        """The back end's `plan(...)`, or None if it has none. One plan serves as `plan=` of every
        call over the same rows."""
        return self.fact(name, "plan", None)

    def fact(self, name: str, attribute: str, default: Any) -> Any:
        """What a back end's module says of itself, or the default where it is silent."""
        return getattr(self._module(name), attribute, default)

    @property
    def _op(self) -> str:
        return self._package.rsplit(".", 1)[-1]

    def _module(self, name: str) -> ModuleType:
        if name not in self.needs:
            raise UnknownBackend(
                f"{self._op} has no back end {name!r}; choose one of: {', '.join(self.needs)}"
            )
        return importlib.import_module(f"{self._package}.{name}")

    def __contains__(self, name: object) -> bool:
        return name in self.needs

    def __iter__(self) -> Iterator[str]:
        return iter(self.needs)

    def __len__(self) -> int:
        return len(self.needs)


def _always(*shapes: Any) -> bool:
    return True
