"""How attention heads divide over tensor shards. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """Head counts of one attention layer.

    Where there are fewer KV heads than shards, each is stored on `repeat` shards, so that
    `kv_stored = kv * repeat` divides evenly.

    Attributes:
        query: query heads.
        kv: the model's own KV heads.
        dim: width of a head.
        shards: tensor shards.
        order: the checkpoint's number of each dimension of a query or key head, see
            `nn.rope.rotary_order`; () keeps them.
    """

    query: int
    kv: int
    dim: int
    shards: int = 1
    order: tuple[int, ...] = ()

    @property
    def repeat(self) -> int:
        """Shards that hold a copy of the same KV head."""
        return max(1, self.shards // self.kv)

    @property
    def kv_stored(self) -> int:
        """KV heads over all shards, copies included."""
        return self.kv * self.repeat

    @property
    def query_per_shard(self) -> int:
        return self.query // self.shards

    @property
    def kv_per_shard(self) -> int:
        return self.kv_stored // self.shards

    def problem(self) -> str | None:
        """Why these heads cannot be divided, or None."""
        if self.query % self.kv:
            return f"{self.query} attention heads are not a multiple of {self.kv} key-value heads"
        if self.query % self.shards:
            return f"{self.query} attention heads do not divide over {self.shards} tensor shards"
        if self.kv % self.shards and self.shards % self.kv:
            return (
                f"{self.kv} key-value heads neither divide over {self.shards} tensor shards "
                "nor repeat evenly on them"
            )
        return None
