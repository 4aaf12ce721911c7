"""Host memory that a device reads and writes by itself."""

PINNED = "pinned_host"  # JAX's name of it
LEAVING = 2  # programs' worth of pages that may be on their way out at once
# Programs' worth that one plan fetches: beside a step of 5 ms a link of 25 GB/s brings as many
PLAN_LOADS = 4
