"""Descriptions of NVIDIA GPUs for XLA's compiler, which compiles for a card that is not here.

The numbers are those of NVIDIA's data sheets and architecture white papers, in the fields of
`stream_executor.GpuTargetConfigProto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pallas_kernels.target import Target

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Card:
    """One kind of GPU.

    Attributes:
        name: as the driver says it.
        capability: compute capability.
        memory: GiB of the device.
        processors: streaming multiprocessors.
        bandwidth: GB/s of the device's memory.
        cache: MiB of the second-level cache.
        shared: KiB of a processor's shared memory.
        block: KiB of shared memory that a block may ask for.
        threads: most threads of a processor at once.
        clock: GHz.
        floats: float32 units of a processor.
        links: NVLink connections.
    """

    name: str
    capability: tuple[int, int]
    memory: float
    processors: int
    bandwidth: int
    cache: int
    shared: int
    block: int
    threads: int
    clock: float
    floats: int = 128
    links: int = 0

    @property
    def offer(self) -> Target:
        """What it offers to kernels."""
        major, minor = self.capability
        return Target.gpu(f"{major}.{minor}", self.processors, self.block << 10)

    @property
    def target(self) -> str:
        """The description as a text protocol buffer."""
        major, minor = self.capability
        extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared << 10}
  threads_per_core_limit: {self.threads}
  core_count: {self.processors}
  fpus_per_core: {self.floats}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}000000000
  l2_cache_size: {self.cache << 20}
  clock_rate_ghz: {self.clock}
  device_memory_size: {int(self.memory * GIB)}
  shared_memory_per_block_optin: {self.block << 10}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  device_interconnect_info {{ active_links: {self.links} }}
  collective_memory_granularity: 2097152
  pcie_bandwidth: 34359738368
  ecc_enabled: true
  name: "{self.name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{self.name}"
"""


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        "h200": Card(
            name="NVIDIA H200",
            capability=(9, 0),
            memory=141,
            processors=132,
            bandwidth=4800,
            cache=50,
            shared=228,
            block=227,
            threads=2048,
            clock=1.98,
            links=18,
        ),
        "a100": Card(
            name="NVIDIA A100-SXM4-40GB",
            capability=(8, 0),
            memory=39.4,
            processors=108,
            bandwidth=1555,
            cache=40,
            shared=164,
            block=163,
            threads=2048,
            clock=1.41,
            floats=64,
            links=12,
        ),
        "rtx-3090": Card(
            name="NVIDIA GeForce RTX 3090",
            capability=(8, 6),
            memory=23.7,
            processors=82,
            bandwidth=936,
            cache=6,
            shared=100,
            block=99,
            threads=1536,
            clock=1.7,
        ),
        "rtx-4090": Card(
            name="NVIDIA GeForce RTX 4090",
            capability=(8, 9),
            memory=23.5,
            processors=128,
            bandwidth=1008,
            cache=72,
            shared=100,
            block=99,
            threads=1536,
            clock=2.52,
        ),
        "b200": Card(
            name="NVIDIA B200",
            capability=(10, 0),
            memory=178.4,
            processors=148,
            bandwidth=7672,
            cache=126,
            shared=228,
            block=227,
            threads=2048,
            clock=1.965,
            links=18,
        ),
        "rtx-5090": Card(
            name="NVIDIA GeForce RTX 5090",
            capability=(12, 0),
            memory=31.4,
            processors=170,
            bandwidth=1792,
            cache=96,
            shared=100,
            block=99,
            threads=1536,
            clock=2.41,
        ),
    }
)
# Cards with the processors of one of those and another memory: what fits differs, not what compiles
MEMORIES: Mapping[str, Card] = MappingProxyType(
    {
        "a100-80": replace(CARDS["a100"], name="NVIDIA A100-SXM4-80GB", memory=79.2),
        "l40s": replace(CARDS["rtx-4090"], name="NVIDIA L40S", memory=44.4, processors=142),
        "h100": replace(CARDS["h200"], name="NVIDIA H100 80GB HBM3", memory=79.2),
    }
)
