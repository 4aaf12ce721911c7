"""Back ends of an op by name, imported on first use, and the options that attention ops share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Required, TypedDict

import jax
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.quantised import is_quantised

# Widths of heads that a back end takes, in ascending order; a back end that is not here takes all
HEAD_DIMS: Mapping[str, tuple[int, ...]] = {"mosaic_gpu": (64, 96, 128, 256)}
# The same over pages of 8 bits, where they differ
HEAD_DIMS_8_BITS: Mapping[str, tuple[int, ...]] = {"mosaic_gpu": (64, 128, 256)}


def head_dims(backend: str, pages: DTypeLike) -> tuple[int, ...]:
    """Widths of heads that a back end takes over pages of this type, ascending; () = all."""
    wide = HEAD_DIMS.get(backend, ())
    return HEAD_DIMS_8_BITS.get(backend, wide) if is_quantised(pages) else wide


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
    return plan._make(parts) if hasattr(plan, "_make") else tuple(parts)


def shifted(table: Array, options: AttentionOptions) -> Array:
    """The page table with `first_page` added, for back ends that do not add it themselves."""
    first = options.pop("first_page", None)
    return table if first is None else table + first


def pools_of(k_pages: Array, v_pages: Array, options: AttentionOptions) -> tuple[Array, ...]:
    """Pages of keys and of values, then their scales where pages have scales."""
    scales = options.get("scales")
    return (k_pages, v_pages) if scales is None else (k_pages, v_pages, scales)


class UnknownBackend(KeyError):
    """The op has no back end of that name; the message lists the existing ones."""

    def __str__(self) -> str:
        return str(self.args[0])


class Backends(Mapping[str, Callable[..., Any]]):
    """The back ends of one op: name → callable.

    Back end `name` is the module `package.name`, which defines `function`. A back end that supports
    only some shapes or types also defines `check(...)`, which raises ValueError for the others.
    """

    def __init__(self, package: str, function: str, names: tuple[str, ...]):
        self._package, self._function, self._names = package, function, names

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return getattr(self._module(name), self._function)

    def check(self, name: str, *shapes: Any) -> None:
        """Raise ValueError, with the reason, if a back end does not support arrays of these shapes
        and types."""
        check = getattr(self._module(name), "check", None)
        if check is not None:
            check(*shapes)

    def supports(self, name: str, *shapes: Any) -> bool:
        """Whether a back end of that name exists and supports arrays of these shapes and types."""
        if name not in self:
            return False
        try:
            self.check(name, *shapes)
        except ValueError:
            return False
        return True

    def planner(self, name: str) -> Callable[..., Any] | None:
        """The back end's `plan(...)`, or None if it has none. One plan serves as `plan=` of every
        call over the same rows."""
        return getattr(self._module(name), "plan", None)

    def _module(self, name: str) -> ModuleType:
        if name not in self._names:
            op = self._package.rsplit(".", 1)[-1]
            raise UnknownBackend(
                f"{op} has no back end {name!r}; choose one of: {', '.join(self._names)}"
            )
        return importlib.import_module(f"{self._package}.{name}")

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
