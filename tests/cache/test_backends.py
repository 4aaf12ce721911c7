"""Which attention back end a device gets, the reason that is shown, and what a person who asks for
another is told."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxllm.cache.backends import LatentShapes, SegmentShapes, Shapes, choose_backend
from jaxllm.config import ATTENTION_BACKENDS, ConfigError
from pallas_kernels import paged_decode, paged_extend
from pallas_kernels.target import PORTABLE, Target
from tests.targets import A100, H200, TPU

QWEN = Shapes(jnp.bfloat16, 128, 64, 7)


HOPPER = H200
AMPERE = A100
CPU = PORTABLE
KINDS = {HOPPER: "NVIDIA H200", AMPERE: "NVIDIA A100"}


@pytest.mark.parametrize(
    ("target", "name", "reason"),
    [
        (HOPPER, "mosaic_gpu", "compute capability 9.0"),
        (TPU, "mosaic_tpu", "TPU"),
        (CPU, "reference", "CPU"),
        *(
            (Target.gpu(c), "xla", f"compute capability {c} has no kernel of its own")
            for c in ("8.0", "8.6", "8.9", "10.0", "12.0")
        ),
        (
            Target("rocm"),
            "xla",
            "rocm has no kernel of its own",
        ),
    ],
)
def test_every_device_gets_its_fastest_back_end_and_says_why(target, name, reason):
    backend = choose_backend(target, QWEN)
    assert (backend.name, backend.reason) == (name, reason)


@pytest.mark.parametrize(
    ("head_dim", "stored"), [(32, 64), (64, 64), (80, 96), (96, 96), (112, 128), (192, 256)]
)
@pytest.mark.parametrize("asked", [None, "mosaic_gpu"])
def test_heads_are_stored_at_the_next_width_that_the_kernels_take(head_dim, stored, asked):
    backend = choose_backend(HOPPER, Shapes(jnp.bfloat16, head_dim, 64, 71), asked)
    assert (backend.name, backend.head_dim) == ("mosaic_gpu", stored)
    said = f"heads of {head_dim} are stored as {stored}, with zeros" in backend.reason
    assert said == (head_dim != stored)
    for other in ("reference", "xla"):
        assert (
            choose_backend(CPU, Shapes(jnp.bfloat16, head_dim, 64, 1), other).head_dim == head_dim
        )


@pytest.mark.parametrize("head_dim", [80, 96])
def test_pages_of_8_bits_store_heads_of_96_wider(head_dim):
    backend = choose_backend(HOPPER, Shapes(jnp.bfloat16, head_dim, 64, 1, jnp.float8_e4m3fn))
    assert (backend.name, backend.head_dim) == ("mosaic_gpu", 128)
    assert f"heads of {head_dim} are stored as 128, with zeros" in backend.reason


@pytest.mark.parametrize(
    ("target", "shapes", "said"),
    [
        (HOPPER, Shapes(jnp.bfloat16, 512, 64, 1), "head_dim 64, 96, 128 or 256"),
        (HOPPER, Shapes(jnp.float32, 80, 64, 1), "bfloat16 or float16"),
        (HOPPER, Shapes(jnp.float32, 128, 64, 1), "bfloat16 or float16"),
        (HOPPER, Shapes(jnp.bfloat16, 128, 8, 1), "pages of 16, 32, 64 or 128"),
        (TPU, Shapes(jnp.bfloat16, 64, 64, 4), "head_dim that is a multiple of 128"),
        (TPU, Shapes(jnp.float16, 128, 64, 4), "bfloat16 or float32"),
        (TPU, Shapes(jnp.bfloat16, 128, 8, 4), "pages of a multiple of 16"),
        (
            TPU,
            Shapes(jnp.bfloat16, 128, 64, 4, jnp.float8_e4m3fn),
            "takes bfloat16 or float32 throughout, got q bfloat16, k float8_e4m3fn",
        ),
        (
            HOPPER,
            Shapes(jnp.bfloat16, 128, 32, 4, jnp.float8_e5m2),
            "8-bit pages of 64 or 128 tokens, got 32",
        ),
    ],
)
def test_what_the_devices_own_kernels_do_not_take_falls_back_with_the_kernels_reason(
    target, shapes, said
):
    backend = choose_backend(target, shapes)
    assert backend.name == "xla"
    assert said in backend.reason


def test_hoppers_own_kernels_take_8_bit_pages():
    assert (
        choose_backend(HOPPER, Shapes(jnp.bfloat16, 128, 64, 7, jnp.float8_e4m3fn)).name
        == "mosaic_gpu"
    )


@pytest.mark.parametrize("target", [HOPPER, AMPERE, TPU, CPU])
@pytest.mark.parametrize("asked", ["xla", "reference"])
def test_the_plain_back_ends_can_be_asked_for_everywhere(target, asked):
    assert choose_backend(target, Shapes(jnp.float32, 80, 8, 3), asked).name == asked


@pytest.mark.parametrize(
    ("target", "shapes", "asked", "message"),
    [
        (
            AMPERE,
            QWEN,
            "mosaic_gpu",
            r"mosaic_gpu needs an NVIDIA GPU of compute capability 9\.0 \(Hopper\), "
            "and this device is NVIDIA A100",
        ),
        (HOPPER, QWEN, "mosaic_tpu", "mosaic_tpu needs a TPU, and this device is NVIDIA H200"),
        (
            HOPPER,
            Shapes(jnp.bfloat16, 512, 64, 1),
            "mosaic_gpu",
            "mosaic_gpu cannot run this model .*head_dim",
        ),
        (
            HOPPER,
            QWEN,
            "FLASH_ATTN",
            "must be one of mosaic_gpu, mosaic_tpu, xla, reference, got 'FLASH_ATTN'",
        ),
    ],
)
def test_a_back_end_that_cannot_run_here_is_an_error_with_the_remedy(
    target, shapes, asked, message
):
    with pytest.raises(
        ConfigError, match=f"--attention-backend {message}" if asked != "FLASH_ATTN" else message
    ):
        choose_backend(target, shapes, asked, KINDS[target])


def test_both_ops_have_every_back_end_that_can_be_asked_for():
    assert set(paged_decode.BACKENDS) == set(paged_extend.BACKENDS) == set(ATTENTION_BACKENDS)


@pytest.mark.parametrize(
    ("target", "dtype", "head_dim", "name", "said"),
    [
        (HOPPER, jnp.bfloat16, 64, "mosaic_gpu", "compute capability 9.0"),
        (HOPPER, jnp.bfloat16, 32, "mosaic_gpu", "heads of 32 are stored as 64, with zeros"),
        (HOPPER, jnp.float16, 80, "mosaic_gpu", "heads of 80 are stored as 96, with zeros"),
        (HOPPER, jnp.float32, 64, "reference", "takes bfloat16 or float16"),
        (HOPPER, jnp.bfloat16, 192, "reference", "takes head_dim 64, 96 or 128"),
        (AMPERE, jnp.bfloat16, 64, "reference", "8.0 has no kernel of its own"),
        (TPU, jnp.bfloat16, 64, "reference", "segment_attention has no back end 'mosaic_tpu'"),
        (CPU, jnp.float32, 32, "reference", "CPU"),
    ],
)
def test_an_encoder_gets_the_kernel_of_hopper_or_the_reference_and_says_why(
    target, dtype, head_dim, name, said
):
    backend = choose_backend(target, SegmentShapes(dtype, head_dim))
    assert backend.name == name
    assert said in backend.reason


def test_an_encoder_refuses_a_back_end_that_it_does_not_have():
    with pytest.raises(ConfigError, match=r"xla cannot run this model .*choose one of: reference"):
        choose_backend(HOPPER, SegmentShapes(jnp.bfloat16, 64), "xla")


LATENT = LatentShapes(jnp.bfloat16, 576, 64, 16, rank=512)


@pytest.mark.parametrize(
    ("target", "changes", "name", "reason"),
    [
        (HOPPER, {}, "mosaic_gpu", "compute capability 9.0"),
        (HOPPER, {"group": 128}, "mosaic_gpu", "compute capability 9.0"),
        (HOPPER, {"dtype": jnp.float32}, "xla", "bfloat16 or float16"),
        (HOPPER, {"group": 12}, "xla", "a multiple of 8 up to 64"),
        (HOPPER, {"head_dim": 20, "rank": 16}, "xla", "takes no latent entries of 20 numbers"),
        (AMPERE, {}, "xla", "has no kernel of its own"),
        (TPU, {}, "xla", "latent_decode has no back end 'mosaic_tpu'"),
        (CPU, {}, "reference", "CPU"),
    ],
)
def test_latents_get_their_kernel_or_the_fallback_with_a_reason(target, changes, name, reason):
    backend = choose_backend(target, replace(LATENT, **changes))
    assert backend.name == name and reason in backend.reason
    assert backend.head_dim == changes.get("head_dim", 576)
