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
        width: of a head as it is stored, an even number, where `dim` is odd or kernels take wider
            heads alone; None is `dim`. Zeros fill each half of a head, so that the same dimensions
            turn together.
    """

    query: int
    kv: int
    dim: int
    shards: int = 1
    order: tuple[int, ...] = ()
    width: int | None = None

    @property
    def stored_dim(self) -> int:
        """Width of a head in weights and pages."""
        if self.width is None:
            return self.dim
        return self.width

    @property
    def key_order(self) -> tuple[int, ...]:
        """The checkpoint's number of each stored dimension of a query or key head; -1 is a zero."""
        return self._stored(self.order)

    @property
    def value_order(self) -> tuple[int, ...]:
        """The same of a value head."""
        return self._stored(())

    def _stored(self, order: tuple[int, ...]) -> tuple[int, ...]:
        if self.stored_dim == self.dim:
            return order
        complete = order or tuple(range(self.dim))
        wide = self.stored_dim // 2
        half = -(-self.dim // 2)
        first = complete[:half]
        second = complete[half:]
        zeros = (-1,) * (self.stored_dim - self.dim)
        return (*first, *zeros[: wide - half], *second, *zeros[wide - half :])

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
