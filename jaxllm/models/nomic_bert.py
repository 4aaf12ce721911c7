"""Nomic BERT: BERT with rotary positions, gated feed-forwards and no biases but in its norms. Its
checkpoints name code of their own, which is not run."""

from __future__ import annotations

from collections.abc import Mapping

from jaxllm.config import ConfigError
from jaxllm.models.config.encoder import attention, dense_head, encoder, encoder_spec
from jaxllm.models.config.read import Config, positive
from jaxllm.models.config.rope import rope
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.blocks import ResidualNormBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import EncoderEmbedding
from jaxllm.nn.linear import Init
from jaxllm.nn.mlp import GatedMLP
from jaxllm.nn.norm import LayerNorm, NoNorm
from jaxllm.pooling import DenseMap

# As published, where GPT-2's keys say the sizes
SPELLING = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
DEFAULTS: Config = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 2048,
    "type_vocab_size": 2,
    "rope_theta": 1000.0,
}
# What published files say of kinds that are not built, with what the family has
ONLY: Config = {
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "use_rms_norm": False,
}
ENCODES = True
REMOTE_CODE = ("modeling_hf_nomic_bert",)
PREFIXES = {"bert.": "nomic_bert."}
LAYER = "nomic_bert.layers.{}"
OLD = "nomic_bert.encoder.layers.{}"
SHARED: Mapping[str, tuple[str, ...]] = {
    "embed": ("nomic_bert.embeddings.word_embeddings",),
    "embed.types": ("nomic_bert.embeddings.token_type_embeddings",),
}
NAMES: Mapping[str, tuple[str, ...]] = {
    **SHARED,
    "embed.norm": ("nomic_bert.embeddings.LayerNorm",),
    "layers.{}.attention.qkv": tuple(f"{LAYER}.self_attn.{letter}_proj" for letter in "qkv"),
    "layers.{}.attention.out": (f"{LAYER}.self_attn.o_proj",),
    "layers.{}.attention_norm": (f"{LAYER}.post_attention_layernorm",),
    "layers.{}.mlp.gate_up": (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
    "layers.{}.mlp.down": (f"{LAYER}.mlp.down_proj",),
    "layers.{}.mlp_norm": (f"{LAYER}.post_mlp_layernorm",),
}
OTHER_NAMES: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {
        **SHARED,
        "embed.norm": ("nomic_bert.emb_ln",),
        "layers.{}.attention.qkv": (f"{OLD}.attn.Wqkv",),
        "layers.{}.attention.out": (f"{OLD}.attn.out_proj",),
        "layers.{}.attention_norm": (f"{OLD}.norm1",),
        "layers.{}.mlp.gate_up": (f"{OLD}.mlp.fc12", f"{OLD}.mlp.fc11"),
        "layers.{}.mlp.down": (f"{OLD}.mlp.fc2",),
        "layers.{}.mlp_norm": (f"{OLD}.norm2",),
    },
)
# Of heads for masked words and labels
IGNORED = tuple(
    f"{name}.{leaf}"
    for name in (
        "nomic_bert.pooler.dense",
        "classifier",
        "cls.predictions",
        "cls.predictions.decoder",
        "cls.predictions.transform.dense",
        "cls.predictions.transform.layer_norm",
    )
    for leaf in ("weight", "bias")
)


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    for key, only in ONLY.items():
        if hf.get(key) not in (None, only):
            raise ConfigError(f"config.json: {key} is {hf[key]!r:.80}; nomic_bert has {only!r}")
    width = positive(hf, "hidden_size")
    heads = positive(hf, "num_attention_heads")
    if hf.get("head_dim") not in (None, width // heads):
        raise ConfigError(
            f"config.json: head_dim is {hf['head_dim']!r:.80}; nomic_bert has {width // heads}"
        )
    length = positive(hf, "max_position_embeddings")
    layers = positive(hf, "num_hidden_layers")
    return encoder_spec(hf, length=length, ropes=lambda dim: (rope(hf, dim),) * layers)


def classifier(hf: Config, labels: int) -> tuple[str, tuple[DenseMap, ...]]:
    """What is pooled for labels, and the maps behind it."""
    return "cls", dense_head(hf, labels, "nomic_bert.pooler.dense", "classifier")


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    width = spec.width

    def norm() -> LayerNorm:
        return LayerNorm(init, width, spec.norm_eps)

    def block() -> ResidualNormBlock:
        return ResidualNormBlock(
            attention_norm=norm(),
            attention=attention(spec, shards, init, bias=False),
            mlp_norm=norm(),
            mlp=GatedMLP(init, width, spec.inner_width, shards, spec.activation),
        )

    types = positive(spec.config, "type_vocab_size")
    embed = EncoderEmbedding(init, spec.vocab_size, width, norm=norm(), types=types)
    return encoder(spec, embed, [block() for _ in spec.layers], NoNorm())
