"""What one grammar may cost, to compile and at each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Seconds of processor time of a compilation; what takes longer begins again where only its like
# wait
BUDGETS = (0.02, 0.1, 1.0)
WALL_SECONDS = 10.0  # and by the clock, on a machine that is busy
MEMORY_BYTES = 2 << 30  # address space of the compiler's process
STEPS = 24  # tokens that a compilation tries out
STEP_SECONDS = 0.025  # for the set of tokens that may come next
TOGETHER_SECONDS = 0.05  # by the clock, for those of all rows of a step
LEAST_SECONDS = 0.002  # for one of them, however many there are


def fair_share(rows: int, cores: int) -> float:
    """Seconds of processor time that the mask of each of so many rows may take when those of all
    take too long together."""
    return min(STEP_SECONDS, max(LEAST_SECONDS, TOGETHER_SECONDS * cores / rows))


def parser_limits() -> LLParserLimits:
    """llguidance's own bounds, of one compilation and of one step: half of its defaults or less,
    and no parser state in its messages."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        max_lexer_states=30_000,
        max_items_in_row=2_000,
        verbose_errors=False,
    )
