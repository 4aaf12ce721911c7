"""What published encoders are made of."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.nn.embedding import EncoderEmbedding
from tests.models.test_published_parts import model_of, spec_of


@pytest.mark.parametrize(
    ("name", "tokens", "first"),
    [("BGE-large-en", 512, 0), ("BGE-M3", 8192, 2)],
)
def test_positions_of_roberta_begin_behind_the_padding(name: str, tokens: int, first: int) -> None:
    embed = model_of(name).embed
    assert spec_of(name).context_length == tokens
    assert isinstance(embed, EncoderEmbedding) and embed.positions is not None
    assert (embed.first, embed.positions.weight.shape[0]) == (first, tokens + first)


def test_modernbert_sees_64_tokens_on_either_side_but_on_every_third_layer() -> None:
    windows = [block.attention.window for block in model_of("ModernBERT-base").layers]
    assert windows == [None, 64, 64, None]
    ropes = spec_of("ModernBERT-base").ropes
    bases = [rope.inv_freq[1] ** -32 for rope in ropes]
    np.testing.assert_allclose(bases, ([160_000.0] + [10_000.0] * 2) * 7 + [160_000.0], rtol=1e-4)
