"""Latent attention for accelerators without a kernel: the reference, a loop over tiles that XLA
compiles for every device."""

from pallas_kernels.latent_decode.reference import latent_decode as latent_decode
from pallas_kernels.xla import prefers as prefers
