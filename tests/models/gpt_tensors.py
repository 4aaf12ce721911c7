"""Tensors of a layer of published models of the first families after GPT-2, as
`test_published_tensors.py` has them of others."""

from __future__ import annotations

type Shapes = dict[str, tuple[int, ...]]

GPT_LAYERS: dict[tuple[str, int], Shapes] = {
    ("GPT-2", 0): {
        "ln_{1,2}.{weight,bias}": (768,),
        "attn.c_attn.weight": (768, 2304),
        "attn.c_attn.bias": (2304,),
        "attn.c_proj.weight": (768, 768),
        "{attn,mlp}.c_proj.bias": (768,),
        "mlp.c_fc.weight": (768, 3072),
        "mlp.c_fc.bias": (3072,),
        "mlp.c_proj.weight": (3072, 768),
    },
    ("GPT-Neo-125M", 1): {
        "ln_{1,2}.{weight,bias}": (768,),
        "attn.attention.{q,k,v,out}_proj.weight": (768, 768),
        "attn.attention.out_proj.bias": (768,),
        "mlp.c_fc.weight": (3072, 768),
        "mlp.c_fc.bias": (3072,),
        "mlp.c_proj.weight": (768, 3072),
        "mlp.c_proj.bias": (768,),
    },
    ("CodeGen-350M", 1): {
        "ln_1.{weight,bias}": (1024,),
        "attn.qkv_proj.weight": (3072, 1024),
        "attn.out_proj.weight": (1024, 1024),
        "mlp.fc_in.weight": (4096, 1024),
        "mlp.fc_in.bias": (4096,),
        "mlp.fc_out.weight": (1024, 4096),
        "mlp.fc_out.bias": (1024,),
    },
    ("StarCoder", 1): {
        "ln_{1,2}.{weight,bias}": (6144,),
        "attn.c_attn.weight": (6400, 6144),
        "attn.c_attn.bias": (6400,),
        "attn.c_proj.weight": (6144, 6144),
        "{attn,mlp}.c_proj.bias": (6144,),
        "mlp.c_fc.weight": (24576, 6144),
        "mlp.c_fc.bias": (24576,),
        "mlp.c_proj.weight": (6144, 24576),
    },
    ("GPT-J-6B", 1): {
        "ln_1.{weight,bias}": (4096,),
        "attn.{q,k,v,out}_proj.weight": (4096, 4096),
        "mlp.fc_in.weight": (16384, 4096),
        "mlp.fc_in.bias": (16384,),
        "mlp.fc_out.weight": (4096, 16384),
        "mlp.fc_out.bias": (4096,),
    },
    ("OPT-350M", 1): {
        "{self_attn,final}_layer_norm.{weight,bias}": (1024,),
        "self_attn.{q,k,v,out}_proj.weight": (1024, 1024),
        "self_attn.{q,k,v,out}_proj.bias": (1024,),
        "fc1.weight": (4096, 1024),
        "fc1.bias": (4096,),
        "fc2.weight": (1024, 4096),
        "fc2.bias": (1024,),
    },
}
