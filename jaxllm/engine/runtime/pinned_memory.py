"""Host memory that a device reads and writes directly."""

PINNED = "pinned_host"  # JAX's name of it
LEAVING = 2  # calls of `save_pages` whose copies may be in flight at once
# Calls of `load_pages` in one plan: a link of 25 GB/s brings as many pages beside a step of 5 ms
PLAN_LOADS = 4
