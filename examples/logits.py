"""Research with logits, without a server: score texts, watch a model's doubt, steer its draws.

.venv/bin/python examples/logits.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import LLM, SamplingParams

SUMS = ("27 + 58 = 85", "27 + 58 = 86")


def steer(logits_SV: jax.Array, state: object, *, token: float = -1.0, push: float = 0.0):
    """Compiled into the engine: add `push` to the logit of `token`, a request at a time."""
    ids_V = jnp.arange(logits_SV.shape[1])
    return logits_SV + jnp.where(ids_V == token[:, None], push[:, None], 0)


def surprise(llm: LLM, text: str) -> float:
    """Mean negative log-likelihood of a text's tokens, in nats."""
    (output,) = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    scores = [
        entry[id].logprob
        for id, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry is not None  # the first token has no past
    ]
    return -sum(scores) / len(scores)


def doubt(llm: LLM, prompt: str) -> list[float]:
    """Entropy of each step's distribution, in bits: a slow function on the host sees the logits."""
    bits: list[float] = []

    def watch(output_ids: list[int], logits_V: np.ndarray) -> np.ndarray:
        p_V = np.exp(logits_V - logits_V.max())
        p_V /= p_V.sum()
        bits.append(float(-(p_V * np.log2(p_V, where=p_V > 0, out=np.zeros_like(p_V))).sum()))
        return logits_V

    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4, logits_processors=[watch]))
    return bits


if __name__ == "__main__":
    llm = LLM("demo", logits_processors=[steer], max_model_len=256, enforce_eager=True)
    for text in SUMS:
        print(f"{text}: {surprise(llm, text):.2f} nats a token")
    print("doubt:", " ".join(f"{bits:.2f}" for bits in doubt(llm, "27 + 58 =")), "bits")
    (token,) = llm.get_tokenizer().encode("9", add_special_tokens=False)
    pushed = {"token": token, "push": 100.0}
    steered = SamplingParams(max_tokens=4, logits_processors=["steer"], extra_args=pushed)
    print("steered:", llm.generate("27 + 58 =", steered)[0].outputs[0].text)
