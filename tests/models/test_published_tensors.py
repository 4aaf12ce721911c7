"""Checkpoints of published models: each tensor of a layer by its name and shape, no other one."""

from __future__ import annotations

import functools
import itertools
import re

import jax.numpy as jnp
import pytest

from jaxllm import models
from jaxllm.models.config.build import ignored, outline, read_name, rules
from jaxllm.nn.rules import Rule
from tests.models.gpt_tensors import GPT_LAYERS, Shapes
from tests.models.published import PUBLISHED

# Model, layer → tensors of the layer, without what they begin with; {a,b} stands for both
LAYERS: dict[tuple[str, int], Shapes] = {
    **GPT_LAYERS,
    ("Llama-3.1-8B", 3): {
        "{input,post_attention}_layernorm.weight": (4096,),
        "self_attn.{q,o}_proj.weight": (4096, 4096),
        "self_attn.{k,v}_proj.weight": (1024, 4096),
        "mlp.{gate,up}_proj.weight": (14336, 4096),
        "mlp.down_proj.weight": (4096, 14336),
    },
    ("Qwen2.5-7B", 0): {
        "{input,post_attention}_layernorm.weight": (3584,),
        "self_attn.{q,o}_proj.weight": (3584, 3584),
        "self_attn.q_proj.bias": (3584,),
        "self_attn.{k,v}_proj.weight": (512, 3584),
        "self_attn.{k,v}_proj.bias": (512,),
        "mlp.{gate,up}_proj.weight": (18944, 3584),
        "mlp.down_proj.weight": (3584, 18944),
    },
    ("Gemma-3-27B", 2): {
        "{input,post_attention}_layernorm.weight": (5376,),
        "{pre,post}_feedforward_layernorm.weight": (5376,),
        "self_attn.{q,k}_norm.weight": (128,),
        "self_attn.q_proj.weight": (4096, 5376),
        "self_attn.{k,v}_proj.weight": (2048, 5376),
        "self_attn.o_proj.weight": (5376, 4096),
        "mlp.{gate,up}_proj.weight": (21504, 5376),
        "mlp.down_proj.weight": (5376, 21504),
    },
    ("Phi-3-mini-128k", 1): {
        "{input,post_attention}_layernorm.weight": (3072,),
        "self_attn.qkv_proj.weight": (9216, 3072),
        "self_attn.o_proj.weight": (3072, 3072),
        "mlp.gate_up_proj.weight": (16384, 3072),
        "mlp.down_proj.weight": (3072, 8192),
    },
    ("gpt-oss-20b", 1): {
        "{input,post_attention}_layernorm.weight": (2880,),
        "self_attn.sinks": (64,),
        "self_attn.q_proj.weight": (4096, 2880),
        "self_attn.{k,v}_proj.weight": (512, 2880),
        "self_attn.o_proj.weight": (2880, 4096),
        "self_attn.q_proj.bias": (4096,),
        "self_attn.{k,v}_proj.bias": (512,),
        "self_attn.o_proj.bias": (2880,),
        "mlp.router.weight": (32, 2880),
        "mlp.router.bias": (32,),
        "mlp.experts.gate_up_proj": (32, 2880, 5760),
        "mlp.experts.gate_up_proj_bias": (32, 5760),
        "mlp.experts.down_proj": (32, 2880, 2880),
        "mlp.experts.down_proj_bias": (32, 2880),
    },
    ("DeepSeek-V2-Lite", 0): {
        "{input,post_attention}_layernorm.weight": (2048,),
        "self_attn.q_proj.weight": (3072, 2048),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 2048),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (4096, 512),
        "self_attn.o_proj.weight": (2048, 2048),
        "mlp.{gate,up}_proj.weight": (10944, 2048),
        "mlp.down_proj.weight": (2048, 10944),
    },
    ("DeepSeek-V3", 3): {
        "{input,post_attention}_layernorm.weight": (7168,),
        "self_attn.q_a_proj.weight": (1536, 7168),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.q_b_proj.weight": (24576, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (32768, 512),
        "self_attn.o_proj.weight": (7168, 16384),
        "mlp.gate.weight": (256, 7168),
        "mlp.gate.e_score_correction_bias": (256,),
        "mlp.{experts.#,shared_experts}.{gate,up}_proj.weight": (2048, 7168),
        "mlp.{experts.#,shared_experts}.down_proj.weight": (7168, 2048),
    },
    ("GLM-4.5-Air", 1): {
        "{input,post_attention}_layernorm.weight": (4096,),
        "self_attn.q_proj.weight": (12288, 4096),
        "self_attn.q_proj.bias": (12288,),
        "self_attn.{k,v}_proj.weight": (1024, 4096),
        "self_attn.{k,v}_proj.bias": (1024,),
        "self_attn.o_proj.weight": (4096, 12288),
        "mlp.gate.weight": (128, 4096),
        "mlp.gate.e_score_correction_bias": (128,),
        "mlp.{experts.#,shared_experts}.{gate,up}_proj.weight": (1408, 4096),
        "mlp.{experts.#,shared_experts}.down_proj.weight": (4096, 1408),
    },
    ("MiniMax-M2", 0): {
        "{input,post_attention}_layernorm.weight": (3072,),
        "self_attn.q_norm.weight": (6144,),
        "self_attn.k_norm.weight": (1024,),
        "self_attn.q_proj.weight": (6144, 3072),
        "self_attn.{k,v}_proj.weight": (1024, 3072),
        "self_attn.o_proj.weight": (3072, 6144),
        "block_sparse_moe.gate.weight": (256, 3072),
        "block_sparse_moe.e_score_correction_bias": (256,),
        "block_sparse_moe.experts.#.{w1,w3}.weight": (1536, 3072),
        "block_sparse_moe.experts.#.w2.weight": (3072, 1536),
    },
    ("Hunyuan-A13B", 2): {
        "{input,post_attention}_layernorm.weight": (4096,),
        "self_attn.{query,key}_layernorm.weight": (128,),
        "self_attn.{q,o}_proj.weight": (4096, 4096),
        "self_attn.{k,v}_proj.weight": (1024, 4096),
        "mlp.gate.wg.weight": (64, 4096),
        "mlp.{experts.#,shared_mlp}.{gate,up}_proj.weight": (3072, 4096),
        "mlp.{experts.#,shared_mlp}.down_proj.weight": (4096, 3072),
    },
    ("ERNIE-4.5-21B-A3B", 1): {
        "{input,post_attention}_layernorm.weight": (2560,),
        "self_attn.{q,o}_proj.weight": (2560, 2560),
        "self_attn.{k,v}_proj.weight": (512, 2560),
        "mlp.gate.weight": (64, 2560),
        "mlp.moe_statics.e_score_correction_bias": (1, 64),
        "mlp.experts.#.{gate,up}_proj.weight": (1536, 2560),
        "mlp.experts.#.down_proj.weight": (2560, 1536),
        "mlp.shared_experts.{gate,up}_proj.weight": (3072, 2560),
        "mlp.shared_experts.down_proj.weight": (2560, 3072),
    },
    ("OLMo-2-7B", 0): {
        "post_{attention,feedforward}_layernorm.weight": (4096,),
        "self_attn.{q,k}_norm.weight": (4096,),
        "self_attn.{q,k,v,o}_proj.weight": (4096, 4096),
        "mlp.{gate,up}_proj.weight": (11008, 4096),
        "mlp.down_proj.weight": (4096, 11008),
    },
    ("Command-R-plus", 0): {
        "input_layernorm.weight": (12288,),
        "self_attn.q_norm.weight": (96, 128),
        "self_attn.k_norm.weight": (8, 128),
        "self_attn.{q,o}_proj.weight": (12288, 12288),
        "self_attn.{k,v}_proj.weight": (1024, 12288),
        "mlp.{gate,up}_proj.weight": (33792, 12288),
        "mlp.down_proj.weight": (12288, 33792),
    },
    ("GPT-NeoX-20B", 0): {
        "{input,post_attention}_layernorm.{weight,bias}": (6144,),
        "attention.query_key_value.weight": (18432, 6144),
        "attention.query_key_value.bias": (18432,),
        "attention.dense.weight": (6144, 6144),
        "attention.dense.bias": (6144,),
        "mlp.dense_h_to_4h.weight": (24576, 6144),
        "mlp.dense_h_to_4h.bias": (24576,),
        "mlp.dense_4h_to_h.weight": (6144, 24576),
        "mlp.dense_4h_to_h.bias": (6144,),
    },
    ("Phi-2", 1): {
        "input_layernorm.{weight,bias}": (2560,),
        "self_attn.{q_proj,k_proj,v_proj,dense}.weight": (2560, 2560),
        "self_attn.{q_proj,k_proj,v_proj,dense}.bias": (2560,),
        "mlp.fc1.weight": (10240, 2560),
        "mlp.fc1.bias": (10240,),
        "mlp.fc2.weight": (2560, 10240),
        "mlp.fc2.bias": (2560,),
    },
    ("BLOOM-7B1", 2): {
        "{input,post_attention}_layernorm.{weight,bias}": (4096,),
        "self_attention.query_key_value.weight": (12288, 4096),
        "self_attention.query_key_value.bias": (12288,),
        "self_attention.dense.weight": (4096, 4096),
        "self_attention.dense.bias": (4096,),
        "mlp.dense_h_to_4h.weight": (16384, 4096),
        "mlp.dense_h_to_4h.bias": (16384,),
        "mlp.dense_4h_to_h.weight": (4096, 16384),
        "mlp.dense_4h_to_h.bias": (4096,),
    },
    ("Apertus-8B", 3): {
        "{attention,feedforward}_layernorm.weight": (4096,),
        "self_attn.{q,o}_proj.weight": (4096, 4096),
        "self_attn.{k,v}_proj.weight": (1024, 4096),
        "self_attn.{q,k}_norm.weight": (128,),
        "mlp.up_proj.weight": (21504, 4096),
        "mlp.down_proj.weight": (4096, 21504),
        "mlp.act_fn.alpha_{p,n}": (1,),
        "mlp.act_fn.{beta,eps}": (),
    },
    ("MPT-7B", 0): {
        "norm_{1,2}.weight": (4096,),
        "attn.Wqkv.weight": (12288, 4096),
        "attn.out_proj.weight": (4096, 4096),
        "ffn.up_proj.weight": (16384, 4096),
        "ffn.down_proj.weight": (4096, 16384),
    },
    ("VaultGemma-1B", 0): {
        "{input,pre_feedforward}_layernorm.weight": (1152,),
        "self_attn.{q,k,v}_proj.weight": (1024, 1152),
        "self_attn.o_proj.weight": (1152, 1024),
        "mlp.{gate,up}_proj.weight": (6912, 1152),
        "mlp.down_proj.weight": (1152, 6912),
    },
    ("DBRX", 0): {
        "norm_attn_norm.norm_{1,2}.weight": (6144,),
        "norm_attn_norm.attn.Wqkv.weight": (8192, 6144),
        "norm_attn_norm.attn.out_proj.weight": (6144, 6144),
        "ffn.router.layer.weight": (16, 6144),
        "ffn.experts.mlp.{w1,v1,w2}": (172032, 6144),
    },
    ("FlexOlmo-7x7B-1T", 0): {
        "post_{attention,feedforward}_layernorm.weight": (4096,),
        "self_attn.{q,k}_norm.weight": (4096,),
        "self_attn.{q,k,v,o}_proj.weight": (4096, 4096),
        "mlp.gate.weight": (7, 4096),
        "mlp.experts.#.{gate,up}_proj.weight": (11008, 4096),
        "mlp.experts.#.down_proj.weight": (4096, 11008),
    },
    ("Falcon-40B", 0): {
        "ln_{attn,mlp}.{weight,bias}": (8192,),
        "self_attention.query_key_value.weight": (9216, 8192),
        "self_attention.dense.weight": (8192, 8192),
        "mlp.dense_h_to_4h.weight": (32768, 8192),
        "mlp.dense_4h_to_h.weight": (8192, 32768),
    },
    ("ChatGLM3-6B", 0): {
        "{input,post_attention}_layernorm.weight": (4096,),
        "self_attention.query_key_value.weight": (4608, 4096),
        "self_attention.query_key_value.bias": (4608,),
        "self_attention.dense.weight": (4096, 4096),
        "mlp.dense_h_to_4h.weight": (27392, 4096),
        "mlp.dense_4h_to_h.weight": (4096, 13696),
    },
    ("InternLM2.5-7B", 0): {
        "{attention,ffn}_norm.weight": (4096,),
        "attention.wqkv.weight": (6144, 4096),
        "attention.wo.weight": (4096, 4096),
        "feed_forward.{w1,w3}.weight": (14336, 4096),
        "feed_forward.w2.weight": (4096, 14336),
    },
    ("BGE-M3", 0): {
        "attention.self.{query,key,value}.weight": (1024, 1024),
        "attention.self.{query,key,value}.bias": (1024,),
        "attention.output.dense.weight": (1024, 1024),
        "{attention.output,output}.{dense,LayerNorm}.bias": (1024,),
        "{attention.output,output}.LayerNorm.weight": (1024,),
        "intermediate.dense.weight": (4096, 1024),
        "intermediate.dense.bias": (4096,),
        "output.dense.weight": (1024, 4096),
    },
    ("ModernBERT-base", 0): {
        "mlp_norm.weight": (768,),
        "attn.Wqkv.weight": (2304, 768),
        "attn.Wo.weight": (768, 768),
        "mlp.Wi.weight": (2304, 768),
        "mlp.Wo.weight": (768, 1152),
    },
    ("gte-multilingual-base", 0): {
        "{attn,mlp}_ln.{weight,bias}": (768,),
        "attention.qkv_proj.weight": (2304, 768),
        "attention.qkv_proj.bias": (2304,),
        "attention.o_proj.weight": (768, 768),
        "attention.o_proj.bias": (768,),
        "mlp.up_gate_proj.weight": (6144, 768),
        "mlp.down_proj.weight": (768, 3072),
        "mlp.down_proj.bias": (768,),
    },
}


def spelled(pattern: str) -> list[str]:
    """The names that a pattern with braces stands for."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


@functools.cache
def table(name: str) -> list[Rule]:
    spec = models.make_spec(PUBLISHED[name])
    return rules(spec, outline(spec.first_layers(4), 1, jnp.bfloat16))


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_a_layer_has_the_tensors_of_the_published_checkpoint(name: str, layer: int) -> None:
    expected = {n: shape for key, shape in LAYERS[name, layer].items() for n in spelled(key)}
    prefix = re.compile(rf".*?\.(?:layers?|h|blocks)\.{layer}\.")
    every = [name for shape in expected for name in spelled(shape)]
    found: Shapes = {}
    for rule in table(name):
        for piece in rule.for_tensors({f"transformer.h.{layer}.{own}" for own in every}).pieces:
            if (begin := prefix.match(piece.name)) is not None:
                own = re.sub(r"(?<=experts\.)\d+", "#", piece.name.removeprefix(begin[0]))
                assert found.setdefault(own, piece.source) == piece.source
    assert found == expected


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("Llama-3.1-8B", "lm_head.weight model.embed_tokens.weight model.norm.weight"),
        ("Gemma-2-9B", "model.embed_tokens.weight model.norm.weight"),
        ("OLMo-1.7-7B", "lm_head.weight model.embed_tokens.weight"),
        ("Minitron-4B", "lm_head.weight model.embed_tokens.weight model.norm.{weight,bias}"),
        (
            "Pythia-1.4B",
            "embed_out.weight gpt_neox.embed_in.weight gpt_neox.final_layer_norm.{weight,bias}",
        ),
        ("GPT-2", "transformer.{wte.weight,wpe.weight,ln_f.weight,ln_f.bias}"),
        ("GPT-J-6B", "lm_head.{weight,bias} transformer.{wte.weight,ln_f.weight,ln_f.bias}"),
        ("OPT-350M", "model.decoder.{embed_tokens,embed_positions,project_in,project_out}.weight"),
        (
            "BLOOM-7B1",
            "transformer.word_embeddings.weight "
            "transformer.{word_embeddings_layernorm,ln_f}.{weight,bias}",
        ),
        ("MPT-7B", "transformer.{wte,norm_f}.weight"),
        ("Falcon-7B", "transformer.{word_embeddings.weight,ln_f.weight,ln_f.bias}"),
        (
            "Phi-2",
            "lm_head.{weight,bias} model.embed_tokens.weight model.final_layernorm.{weight,bias}",
        ),
        ("InternLM2.5-7B", "output.weight model.{tok_embeddings,norm}.weight"),
        ("ModernBERT-base", "model.{embeddings.tok_embeddings,embeddings.norm,final_norm}.weight"),
    ],
)
def test_the_tensors_outside_the_layers_are_those_of_the_checkpoint(name: str, names: str) -> None:
    found = {piece.name for rule in table(name) for piece in rule.pieces}
    outside = {each for each in found if not re.search(r"\.(layers?|h|blocks)\.\d+\.", each)}
    assert outside == {each for pattern in names.split() for each in spelled(pattern)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_tensor_is_both_needed_and_left_out(name: str) -> None:
    spec = models.make_spec(PUBLISHED[name]).first_layers(4)
    needed = {piece.name for rule in table(name) for piece in rule.pieces}
    encodes = hasattr(models.family(spec.model_type), "ENCODES")
    left_out = {} if encodes else ignored(spec)
    assert not needed & set(left_out)
    common = read_name(spec, needed)
    assert {common(each) for each in needed} == needed


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Kimi-K2", "gpt-oss-20b", "Hunyuan-A13B"])
def test_published_mixtures_divide_over_eight_devices(name: str) -> None:
    model = outline(models.make_spec(PUBLISHED[name]).first_layers(2), 8, jnp.bfloat16)
    experts = model.layers[1].mlp.experts
    assert experts.down.weight.get_metadata("axes")[0] == "expert"
    assert experts.down.shape[0] % 8 == 0
