"""What a pooling model makes of a prompt: a vector, or a number for each label; or of each of its
tokens. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

RUNNERS = ("auto", "generate", "pooling")
CONVERTS = ("auto", "none", "embed", "classify")
# Which tokens' hidden states are pooled, and how
MODES = ("last", "cls", "mean", "max", "mean_sqrt_len", "weighted_mean")
ALL = "all"  # in place of a mode: nothing is pooled, every token has a result of its own
LATE = "late"  # in place of a mode: the mean of what the maps make of each token
EMBEDDINGS = ("embed", "token_embed")
CLASSES = ("classify", "token_classify")
TASKS = EMBEDDINGS + CLASSES


@dataclass(frozen=True, kw_only=True)
class DenseMap:
    """A linear map behind the pool.

    Attributes:
        name: of its checkpoint tensors, without ".weight" and ".bias".
        inputs, outputs: widths.
        bias: whether it has one.
        activation: after it: "identity", "tanh" or "gelu".
        norm: name of a layer norm after that; "" for none.
        norm_eps: of it.
        norm_bias: whether it has one.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    activation: str = "identity"
    norm: str = ""
    norm_eps: float = 0.0
    norm_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How hidden states of a prompt become its result.

    Attributes:
        task: "embed" (a vector), "classify" (a number for each label), "token_embed" or
            "token_classify" (the same of every token).
        modes: of `MODES`, the results of several stand side by side; or `ALL` or `LATE` alone.
        token_logits: for each element of the result, the token whose logit it is, and one whose
            logit is taken from it; empty where the pooled vector itself goes on.
        maps: what the pooled vector goes through, on the device.
        size: elements of the result.
        normalises: the result is scaled to length one unless a request says otherwise.
        is_matryoshka: a request may cut the vector.
        dimensions: the lengths that it may be cut to; empty: any.
        labels: names of the classes.
        activation: of classes: "softmax", "sigmoid" or "identity".
        bidirectional: tokens see those after them, too; nothing is cached.
        prompts: names of types of inputs, each with the text that goes before such an input where
            a request names the type.
    """

    task: str
    modes: tuple[str, ...]
    maps: tuple[DenseMap, ...]
    size: int
    normalises: bool = False
    is_matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    token_logits: tuple[tuple[int, int | None], ...] = ()
    activation: str = "identity"
    bidirectional: bool = False
    prompts: tuple[tuple[str, str], ...] = ()

    @property
    def of_tokens(self) -> bool:
        """Whether every token has a result of its own."""
        return self.modes == (ALL,)

    @property
    def takes_chunks(self) -> bool:
        """Whether a prompt may be computed in parts: only its last token is pooled."""
        return self.modes == ("last",) and not self.bidirectional
