"""What the 128 lanes of a warpgroup do, written once: a lane program is a function of a machine,
whose methods are instructions.

`Ptx` writes the program down as assembly for NVIDIA GPUs of compute capability 8.9 and later;
`Emulated` runs it in JAX, lane by lane, for the interpreter, which knows no assembly. A value is a
32-bit register: its name, or an array `[128]` of every lane's. Lane 32·warp + 4·g + c is the one
that fragments of matrices call (g, c).

Tiles of bytes in shared memory are `[rows, width]` in pieces of 8 rows x up to 128 bytes, swizzled,
as the copy engine leaves them.
"""

from pallas_kernels.lanes.emulated import Emulated as Emulated
from pallas_kernels.lanes.machine import LANES as LANES
from pallas_kernels.lanes.ptx import Ptx as Ptx
from pallas_kernels.lanes.run import Machine as Machine
from pallas_kernels.lanes.run import byte_tiled as byte_tiled
from pallas_kernels.lanes.run import plain as plain
from pallas_kernels.lanes.run import run as run
