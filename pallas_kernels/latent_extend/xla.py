"""Latent attention for accelerators without a kernel: the reference, a loop over tiles that XLA
compiles for every device."""

from pallas_kernels.latent_extend.reference import latent_extend as latent_extend
from pallas_kernels.xla import prefers as prefers
