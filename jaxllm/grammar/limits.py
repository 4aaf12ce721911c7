"""Limits of what one grammar may cost, to compile and at each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Seconds of processor time of a compilation, by lane; a job that exceeds one starts again in the
# next
BUDGETS = (0.02, 0.1, 1.0)
MEMORY_BYTES = 2 << 30  # address space of the compiler's process
STEPS = 24  # tokens that a compilation tries out where several may come
FORCED = 512  # and tokens between them that must come
STEP_SECONDS = 0.025  # processor time of one mask
TOGETHER_SECONDS = 0.05  # of the masks of all rows of a step, by the clock
LEAST_SECONDS = 0.002  # processor time that one mask may always take


def fair_share(rows: int, cores: int) -> float:
    """Seconds of processor time for the mask of each row, when the masks of all took too long."""
    return min(STEP_SECONDS, max(LEAST_SECONDS, TOGETHER_SECONDS * cores / rows))


def parser_limits() -> LLParserLimits:
    """llguidance's limits of one compilation and one step: half of its defaults or less, and no
    parser state in messages."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        max_lexer_states=30_000,
        max_items_in_row=2_000,
        verbose_errors=False,
    )
