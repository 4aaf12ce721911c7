"""Shapes and shardings of every array that step programs share, known before weights are loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxllm.cache.arrays import KVCache, Zeros, page_counts
from jaxllm.cache.backends import Target
from jaxllm.cache.collective import Collective, group_of, over
from jaxllm.cache.groups import Place
from jaxllm.cache.kv import PagedContext
from jaxllm.cache.peers import Layout, inbox_shapes
from jaxllm.cache.states import StateInputs
from jaxllm.cache.step import PagedInputs
from jaxllm.engine.runtime.packing import ChunkLayout
from jaxllm.engine.runtime.state import ForwardOutput, SlotState
from jaxllm.engine.scheduling.buckets import Buckets, ExtendShape
from jaxllm.engine.scheduling.plan import pages_of_decode
from jaxllm.logprobs import widths
from jaxllm.mesh import LAYER, PINNED, WHOLE, Stage, layer_devices, per_device
from jaxllm.pooling import Pooling
from jaxllm.sampling.process import LogitsParams
from jaxllm.sampling.processor_arguments import Processor
from jaxllm.sampling.sample import DrawRows, Sampler, choose_draw, is_draw_kernel, sample
from jaxllm.sampling.split_vocabulary import SplitVocabulary

type Draw = Callable[[Array, DrawRows, Sampler, str], Array]


@dataclass(frozen=True)
class Model:
    """The static half of a model.

    Attributes:
        graphdef, treedef: how to rebuild the module from its weight leaves inside a trace.
        backend: of the attention kernels.
        target: for which other kernels are chosen.
        page_size: tokens of a KV page.
        places: where the cache of each layer lies.
        processors: research code that `process_logits` runs.
        batch_invariant: attention splits no row, so a row's result does not depend on the others.
        peers: of the inboxes by which devices add up; None where XLA does.
        inboxes: a device's part of `Inboxes.arrays` inside a trace.
    """

    graphdef: nnx.GraphDef
    treedef: jax.tree_util.PyTreeDef
    mesh: Mesh
    backend: str
    target: Target
    page_size: int
    places: tuple[Place, ...]
    processors: tuple[Processor, ...] = ()
    batch_invariant: bool = False
    peers: Layout | None = None
    inboxes: tuple[Array, ...] = ()

    @functools.cached_property
    def collective(self) -> Collective:
        """The devices that share the layers."""
        return over(self.mesh, self.peers, self.inboxes)

    def with_peers(self, inboxes: tuple[Array, ...]) -> Model:
        """The model in a program that was given these."""
        return replace(self, inboxes=inboxes)

    def context(
        self,
        kv: KVCache,
        inputs: Sequence[PagedInputs | StateInputs],
        prompt_length_T: Array,
    ) -> PagedContext:
        """What a step attends with, inside a trace; `inputs` are those of each cache group."""
        return PagedContext(
            kv,
            self.places,
            inputs,
            self.backend,
            self.collective,
            prompt_length_T,
            self.batch_invariant,
            self.target,
        )

    def rebuild(self, weights: tuple[Array, ...]) -> nnx.Module:
        """The nnx module around these leaves, whole ones or one device's."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights))


@dataclass(frozen=True)
class StepShapes:
    """The arrays of one engine as shapes with shardings. Each property without arguments, and each
    method of a number of rows, is an array or a tree of them that programs take and give.

    Attributes:
        model: the static half of the model.
        weights: leaves of the model.
        kv: the page pools.
        slots: usable slots S, at least as many as the largest decode step has rows.
        table_width: pages of a slot's table, of all cache groups together.
        hidden_states: `packed_carries` of the largest step's chunk tokens.
        vocab_size: V.
        buckets: the compiled shapes.
        max_logprobs: most likely tokens that a request may ask for.
        logprobs_mode: one of `config.LOGPROBS_MODES`.
        moved_pages: pages that one program moves to or from host memory; 0 without host memory.
        platform: target of the programs, "gpu" say; the mesh may be of other devices.
        pooling: how the model pools; None when it generates.
        stage: which layers of the model these devices have.
        hidden_width: D.
        decode_inputs: tokens that a decode row takes at most: the last one drawn, and drafts.
    """

    model: Model
    weights: tuple[jax.ShapeDtypeStruct, ...]
    kv: KVCache
    slots: int
    table_width: int
    hidden_states: jax.ShapeDtypeStruct
    vocab_size: int
    buckets: Buckets
    max_logprobs: int = 0
    logprobs_mode: str = "raw_logprobs"
    moved_pages: int = 0
    platform: str = "cpu"
    pooling: Pooling | None = None
    stage: Stage = WHOLE
    hidden_width: int = 0
    decode_inputs: int = 1

    @functools.cached_property
    def zeros(self) -> Zeros:
        """Makes arrays of these shapes."""
        return Zeros()

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.model.mesh, PartitionSpec())

    @functools.cached_property
    def host(self) -> NamedSharding:
        """Where host and programs meet. On GPUs it is pinned host memory: programs access it in
        order with their other work, while a copy to or from other memory takes a millisecond."""
        if self.platform == "gpu":
            return self.replicated.with_memory_kind(PINNED)
        return self.replicated

    @functools.cached_property
    def split_vocab(self) -> NamedSharding:
        """Of arrays [rows, V]: by vocabulary over the devices, where it divides."""
        split = self.vocab_size % layer_devices(self.model.mesh) == 0
        return NamedSharding(
            self.model.mesh, PartitionSpec(None, LAYER) if split else PartitionSpec()
        )

    @functools.cached_property
    def num_groups(self) -> int:
        """Cache groups with pages; each has a page pool of its own."""
        return len(page_counts(self.kv))

    @property
    def row_writes(self) -> int:
        """Page-table entries of a decode row that a step brings at most."""
        return self.num_groups * pages_of_decode(self.decode_inputs, self.model.page_size)

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Most likely tokens that the compiled programs give, ascending."""
        return widths(self.max_logprobs)

    def width(self, needed: int) -> int:
        """The least compiled width that gives `needed` most likely tokens."""
        return next(width for width in self.widths if width >= needed)

    @functools.cached_property
    def peers(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """`Inboxes.arrays`; () where XLA adds up."""
        layout = self.model.peers
        if layout is None:
            return ()
        return inbox_shapes(self.model.mesh, layout)

    def draw(self, peers: tuple[Array, ...]) -> Draw:
        """How a device samples from the logits that it has, with its part of `peers`."""
        if self.split_vocab.is_fully_replicated:
            return sample
        return SplitVocabulary(group_of(self.model.mesh, self.model.peers, peers)).sample

    @functools.cached_property
    def draw_backend(self) -> str:
        """Which of `pallas_kernels.draw` samples."""
        return choose_draw(self.model.target, self.logits(self.buckets.logits[-1]))

    @functools.cached_property
    def samplers(self) -> tuple[Sampler, ...]:
        """The compiled samplers, cheapest first. The kernel filters as fast as it draws, so with it
        one program serves both."""
        if is_draw_kernel(self.draw_backend):
            return tuple(sampler for sampler in Sampler if sampler is not Sampler.RANDOM)
        return tuple(Sampler)

    @functools.cached_property
    def state(self) -> SlotState:
        """The slot state."""
        shapes = SlotState.shapes(self.slots, self.table_width)
        return jax.tree.map(lambda s: self.array(s.shape, s.dtype), shapes)

    @functools.cached_property
    def chunk_layouts(self) -> dict[ExtendShape, ChunkLayout]:
        """How the chunks of each compiled shape are packed."""
        return {
            shape: ChunkLayout(shape, self.table_width, self.buckets.logit_rows(shape))
            for shape in self.buckets.extend
        }

    def forward_output(self, rows: int) -> ForwardOutput:
        """Result of a forward with `rows` rows of logits."""
        return ForwardOutput(
            self.logits(rows), self.array((rows,), jnp.int32), self.array((rows,), jnp.bool_)
        )

    def logits(self, rows: int) -> jax.ShapeDtypeStruct:
        """The logits to sample from: those of the last forward, or of `process_logits` after it."""
        shape = rows, self.vocab_size
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.split_vocab)

    processed_logits = logits

    @functools.cached_property
    def logits_params(self) -> LogitsParams:
        """Parameters of `process_logits` for each slot."""
        shapes = LogitsParams.shapes(self.slots, self.vocab_size, self.model.processors)
        return jax.tree.map(lambda s: self.array(s.shape, s.dtype), shapes)

    @functools.cached_property
    def counts(self) -> jax.ShapeDtypeStruct:
        """[S+1, V]: how often each slot's output has each token."""
        shape = self.slots + 1, self.vocab_size
        return jax.ShapeDtypeStruct(shape, jnp.uint16, sharding=self.split_vocab)

    def handed(self, tokens: int) -> jax.ShapeDtypeStruct:
        """Hidden states of so many tokens, as a stage hands them on: [T, D]."""
        return self.array((tokens, self.hidden_width), self.hidden_states.dtype)

    def drawn(self, rows: int) -> jax.ShapeDtypeStruct:
        """Tokens of a step with so many rows of logits, as the last stage tells them to others."""
        return self.array((2, rows), jnp.int32)

    def array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """An array that is whole on every device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def per_device(self, function: Callable, takes: Any, gives: Any) -> Callable:
        """See `jaxllm.mesh.per_device`."""
        return per_device(function, self.model.mesh, takes, gives)

    def host_buffer(self, size: int) -> jax.ShapeDtypeStruct:
        """An int32 buffer that the host fills for a program."""
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self.host)


def packed_carries(mesh: Mesh, tokens: int, width: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """What `extend` leaves of so many tokens: every device its own part of `Carry.packed`, below
    each other."""
    place = NamedSharding(mesh, PartitionSpec(LAYER))
    return jax.ShapeDtypeStruct((layer_devices(mesh) * tokens, width), dtype, sharding=place)
