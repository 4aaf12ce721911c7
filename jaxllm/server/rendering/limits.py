"""Limits of what rendering one conversation may cost."""

from __future__ import annotations

# Seconds of processor time of a job, by lane; a job that exceeds one starts again in the next
BUDGETS = (0.1, 2.0)
# Seconds of processor time of the probes of one template, and by the clock of all templates
PROBE_SECONDS = 2.0
ALL_PROBES_SECONDS = 10.0
# Jobs that wait for each lane, at most
MAX_WAITING = (4096, 32)
# Bytes of these jobs together; one alone may be larger
MAX_WAITING_BYTES = (256 << 20, 64 << 20)
MEMORY_BYTES = 2 << 30  # address space of the renderer's process
MAX_MARKED = 1 << 16  # control tokens that are kept as text: 12 µs of the tokenizer's time each
