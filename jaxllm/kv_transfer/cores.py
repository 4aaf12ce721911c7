"""How many cores copy pages at once: one copies far fewer bytes a second than a device's link
carries."""

from __future__ import annotations

import os

# A quarter of the machine's. Of one fetch so many connections, of a shelf so many copies
CORES = min(8, max(2, (os.cpu_count() or 1) // 4))
