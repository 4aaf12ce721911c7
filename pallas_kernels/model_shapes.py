"""Sizes of a model's weights, for tests and benchmarks of every product."""

# (O, I) of a layer of Qwen2.5-7B
LAYER_SHAPES = {
    "gate_up": (37888, 3584),
    "down": (3584, 18944),
    "qkv": (4608, 3584),
    "o": (3584, 3584),
}
