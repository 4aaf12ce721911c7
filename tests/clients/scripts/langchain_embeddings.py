"""langchain-openai: vectors of texts, which are sent as texts. The model's vectors hold the sum
of a prompt's bytes, their number and 3, before they are normalised."""

import math
import sys

from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

URL = sys.argv[1]
TEXTS = ["hello world", "b"]

embeddings = OpenAIEmbeddings(
    model="fake",
    base_url=f"{URL}/v1",
    api_key=SecretStr("none"),
    check_embedding_ctx_length=False,
    max_retries=0,
)
for text, vector in zip(TEXTS, embeddings.embed_documents(TEXTS), strict=True):
    numbers = [sum(text.encode()), len(text), 3]
    norm = math.hypot(*numbers)
    assert all(abs(a - b / norm) < 1e-6 for a, b in zip(vector, numbers, strict=True)), text
assert len(embeddings.embed_query("a")) == 3
print("ok")
