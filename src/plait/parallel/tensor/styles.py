"""Forward functions of tensor-parallel modules, one per style of a plan.

Weights are DTensors over the tp axis, so that sharding, checkpoints and clipping see the shape of
the global tensor. Computation uses plain local tensors with the collectives of `comm.collectives`.
This takes fewer dispatches than DTensor arithmetic, and makes every collective explicit. Layers
that read the same input (q, k, v; gate, up) are siblings. They share one `RegionInput`, which
gathers the input and reduces its gradient once for all siblings.

Note [Random streams of tensor parallelism]
    Tensors that are replicated over tp need the same random numbers (dropout) on all ranks. Tensors
    that are split need different numbers on each rank, so that heads, columns and tokens of
    different ranks are dropped independently. A split part of a model is the part between a
    column-parallel layer and the row-parallel layer after it, or one that computes on sequence
    shards. A rank may draw any number of random numbers in a split part. After the part, all ranks
    continue with the shared stream.

    Megatron-LM's `CudaRNGStatesTracker` does the same with a second generator state. Here the seed
    of a rank's stream is derived from the shared stream at the beginning of the split part, so
    restoring the shared generator (recomputation, a checkpoint) restores the same dropout masks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from plait._torch.modules import direct_parameters, hooks_of
from plait._torch.operators import FakeTensor
from plait._torch.tensors import local_tensor
from plait.cluster import accelerator
from plait.comm.collectives import (
    enter,
    gather,
    gather_sum,
    leave,
    leave_scatter,
    shard_range,
    split,
)
from plait.errors import ModelError
from plait.hashing import GOLDEN_RATIO, WORD_MASK, mix_bits
from plait.model.layers import is_conv1d
from plait.parallel.micro_batches import rebuild
from plait.parallel.tensor.hook_checks import is_foreign
from plait.parallel.tensor.overlap import Weight, enter_overlapped, product, summed_product

SEQUENCE = 1
"""Dimension of hidden states [batch, seq, hidden] that sequence parallelism shards."""


Forward = Callable[..., torch.Tensor]


@dataclass
class Region:
    """State that all tensor-parallel modules of a model share: the tp group and settings."""

    group: ProcessGroup
    mesh: DeviceMesh
    sequence_parallel: bool = False
    length: int = 0
    """Global length of the sequence-sharded dimension in the current forward."""
    overlap: int = 0
    """Number of chunks of a row-parallel product, see `TensorParallel.tensor_overlap`."""
    gather_logits: bool = True
    """True if the head gathers its logits over the vocabulary. Otherwise they stay sharded."""
    loss_parallel: bool = True
    """True if a loss that supports sharded logits may receive them."""
    random_scope: Literal["parts", "blocks", "nothing"] = "parts"
    """Parts of the model in which each rank draws different random numbers.

    parts: from a column-parallel layer to the row-parallel layer after it. blocks: everywhere in a
    block, which computes on sequence shards. nothing: all ranks always draw the same numbers.
    """
    stream: SplitStream = field(init=False, repr=False)
    """Random stream of this rank."""

    def __post_init__(self) -> None:
        self.stream = SplitStream(self.group.rank())

    def split_logits_for(self, loss_fn: object) -> None:
        """Keep the head's logits sharded if `loss_fn` supports sharded logits."""
        self.gather_logits = not (self.loss_parallel and getattr(loss_fn, "split_logits", False))

    def enter_part(self, module: nn.Module, like: torch.Tensor, *, read: torch.Tensor) -> None:
        """Begin a split part, see Note [Random streams of tensor parallelism].

        Args:
            module: A column-parallel layer.
            like: The output of the layer on this rank.
            read: The input of the layer.
        """
        if self.random_scope == "parts" and module.training:
            self.stream.enter(like, read=read)

    def leave_part(self) -> None:
        """End a split part. A row-parallel layer calls this before it reads its input."""
        if self.random_scope == "parts":
            self.stream.leave()


@dataclass
class RegionInput:
    """Input of the tensor-parallel region that sibling layers share (Megatron's f).

    The siblings read the same tensor, one after the other. The first sibling's call gathers the
    tensor, and later calls reuse the result.
    """

    region: Region
    sequence: bool = False
    """True if the input is sharded along the sequence."""
    is_gathered: bool = False
    """True if a container has gathered the input already (see `gather_at`)."""
    uses: int = 1
    """Number of siblings."""
    siblings: list[nn.Module] = field(default_factory=list, repr=False)
    """Column-parallel layers that compute with this rank's columns of their weight."""
    _deferred: dict[int, Weight] = field(default_factory=dict, repr=False)
    """Weights of the current input whose layers have not been called yet."""
    _seen: torch.Tensor | None = field(default=None, repr=False)
    """Input of the first sibling while others have yet to read it."""
    _entered: torch.Tensor | None = field(default=None, repr=False)
    _remaining_uses: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the unsharded input, whose gradient will be summed over the ranks of tp."""
        if self.is_gathered:
            return x
        if self._seen is not x or not self._remaining_uses:
            self._entered = self._enter(x)
            self._seen = x
            self._remaining_uses = self.uses
        self._remaining_uses -= 1
        entered = self._entered
        assert entered is not None
        if not self._remaining_uses:
            # The last sibling has read it. A reference would keep the activations alive.
            self._seen = None
            self._entered = None
        return entered

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        self._deferred = {}
        if self.sequence:
            return gather_sum(x, self.region.group, dim=SEQUENCE, length=self.region.length)
        if not (self.region.overlap and self.siblings and x.requires_grad):
            return enter(x, self.region.group)
        trainable = {}
        for module in self.siblings:
            weight = _out_in(module, _weight(module))
            if weight.requires_grad:
                trainable[id(module)] = weight
        entered, self._deferred = enter_overlapped(x, self.region.group, trainable)
        return entered

    def deferred(self, module: nn.Module) -> Weight | None:
        """Return a sibling's weight, whose gradient is computed during the input's all-reduce.

        The result is None if the gradients do not overlap. Call this after the sibling has read the
        input.
        """
        return self._deferred.pop(id(module), None)


def colwise(
    module: nn.Module, region: Region, region_input: RegionInput, *, begins_part: bool
) -> Forward:
    """Return the forward of a column-parallel layer, whose output is this rank's columns.

    Args:
        module: The layer.
        region: The region of the model.
        region_input: The input that siblings share.
        begins_part: Whether the layer begins a split part of the model, see Note [Random streams of
            tensor parallelism].
    """
    region_input.siblings.append(module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        entered = region_input(x)
        deferred = region_input.deferred(module)
        if deferred is not None:
            y = product(entered, deferred, _bias(module))
        else:
            y = _matmul(module, entered, _weight(module), _bias(module))
        if begins_part:
            region.enter_part(module, y, read=x)
        return y

    return forward


def colwise_gather_output(module: nn.Module, region: Region, region_input: RegionInput) -> Forward:
    """Return the forward of a column-parallel layer that gathers its output."""
    features = _out_features(module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = _matmul(module, region_input(x), _weight(module), _bias(module))
        return gather(y, region.group, dim=-1, length=features)

    return forward


def kv_replicated(
    module: nn.Module, region: Region, region_input: RegionInput, *, heads: int, begins_part: bool
) -> Forward:
    """Return the forward of a key or value projection with fewer heads than ranks.

    The weight is replicated, and each rank computes the one head that its queries use.

    Args:
        module: The projection.
        region: The region of the model.
        region_input: The input that siblings share.
        heads: Number of key and value heads.
        begins_part: See `colwise`.
    """
    head = region.group.rank() * heads // region.group.size()
    rows = _out_features(module) // heads

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = enter(_weight(module), region.group)
        # [out, in] -> [head_dim, in]
        weight = weight.narrow(_out_dim(module), head * rows, rows)
        bias = _bias(module)
        if bias is not None:
            bias = enter(bias, region.group).narrow(0, head * rows, rows)
        y = _matmul(module, region_input(x), weight, bias)
        if begins_part:
            region.enter_part(module, y, read=x)
        return y

    return forward


def rowwise(module: nn.Module, region: Region, *, split_input: bool, sequence: bool) -> Forward:
    """Return the forward of a row-parallel layer, whose partial outputs are summed over the ranks.

    Args:
        module: The layer.
        region: The region of the model.
        split_input: Whether the input is replicated, so that each rank must select its features.
        sequence: Whether the output is sharded along the sequence.
    """

    def forward(x: torch.Tensor) -> torch.Tensor:
        region.leave_part()
        if split_input:
            x = split(x, region.group, dim=-1)
        if region.overlap and not sequence:
            weight = _out_in(module, _weight(module))
            y = summed_product(x, weight, region.group, chunks=region.overlap)
        else:
            y = _matmul(module, x, _weight(module), None)
            if sequence:
                # [batch, seq, out] -> [batch, seq / tp, out]
                y = leave_scatter(y, region.group, dim=SEQUENCE)
            else:
                y = leave(y, region.group)

        # The bias is added once, after the sum.
        bias = _bias(module)
        if bias is None:
            return y
        if sequence:
            # Each rank sees the tokens of its shard only, so the gradient is summed over the ranks.
            bias = enter(bias, region.group)
        return y + bias

    return forward


def embedding_rowwise(module: nn.Embedding, region: Region) -> Forward:
    """Return the forward of an embedding whose rows are split over the ranks.

    The rank that has the row of a token looks the row up, and the other ranks add zeros. The lookup
    uses the original forward of the module, so that subclasses that scale the rows are supported.
    """
    original = module.forward
    start, size = shard_range(module.num_embeddings, region.group)
    padding = module.padding_idx
    local_padding = None
    if padding is not None and start <= padding < start + size:
        local_padding = padding - start

    def forward(ids: torch.Tensor) -> torch.Tensor:
        weight = _weight(module)
        # There are more ranks than rows, and this rank has none.
        if not size:
            return leave(weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum(), region.group)
        is_local = (ids >= start) & (ids < start + size)
        with replace_values(module, {"weight": weight}, padding_idx=local_padding):
            # [batch, seq] -> [batch, seq, hidden]
            hidden = original((ids - start).masked_fill(~is_local, 0))
        return leave(hidden * is_local.unsqueeze(-1), region.group)

    return forward


def vocab_head(module: nn.Module, region: Region, region_input: RegionInput) -> Forward:
    """Return the forward of a head whose columns are split over the vocabulary.

    The logits are gathered, or left as a DTensor sharded over the vocabulary for a loss that
    supports it.
    """
    features = _out_features(module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = _matmul(module, region_input(x), _weight(module), _bias(module))
        hooks = (*hooks_of(module, "forward").values(), *hooks_of(module, "backward").values())
        # A hook of the user must receive the logits of the full vocabulary.
        if region.gather_logits or any(is_foreign(hook) for hook in hooks):
            return gather(y, region.group, dim=-1, length=features)
        shape = torch.Size((*y.shape[:-1], features))
        stride = tuple(torch.empty(shape, device="meta").stride())
        return DTensor.from_local(
            y, region.mesh, [Shard(y.ndim - 1)], run_check=False, shape=shape, stride=stride
        )

    # A loss in chunks applies the head itself, and needs the region for it.
    forward.__dict__["region"] = region
    return forward


def summed_gradient(module: nn.Module, region: Region) -> Forward:
    """Return the forward of a replicated module that ranks call with different tokens or heads.

    The returned function runs the original forward. Its backward sums the gradients of the
    parameters over tp.
    """
    original = module.forward
    names = [name for name, _ in module.named_parameters(recurse=False)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        with replace_values(
            module, {name: enter(getattr(module, name), region.group) for name in names}
        ):
            return original(*args, **kwargs)

    return forward


def gather_at(module: nn.Module, region: Region) -> None:
    """Gather the sequence-sharded hidden states at the input of a container (attention, MLP).

    The container derives shapes and positions from the hidden states, so it needs all tokens.
    """

    def gather(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return on_hidden(
            lambda hidden: gather_sum(hidden, region.group, dim=SEQUENCE, length=region.length),
            args,
            kwargs,
        )

    module.register_forward_pre_hook(gather, with_kwargs=True, prepend=True)


def compute_on_all_tokens(module: nn.Module, region: Region) -> None:
    """Make a module of a block compute the same on every rank, with all tokens.

    Its sequence-sharded hidden states are gathered. Each rank keeps its tokens of the output, which
    is a tensor or the first entry of a tuple. The gradient of the output is gathered as well, so
    every rank has complete gradients of the parameters.
    """

    def gather_input(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return on_hidden(
            lambda hidden: gather(hidden, region.group, dim=SEQUENCE, length=region.length),
            args,
            kwargs,
        )

    def split_output(_module: nn.Module, _args: object, output: Any) -> Any:
        if isinstance(output, tuple | list):
            entries = dict(enumerate(output))
            entries[0] = split(output[0], region.group, dim=SEQUENCE)
            return rebuild(output, entries)
        return split(output, region.group, dim=SEQUENCE)

    module.register_forward_pre_hook(gather_input, with_kwargs=True, prepend=True)
    module.register_forward_hook(split_output)


def on_hidden(
    change: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply a function to the hidden states among the arguments of a forward.

    Hidden states are the first positional argument, or the argument `hidden_states`.
    """
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


@contextmanager
def replace_values(
    module: nn.Module, tensors: dict[str, torch.Tensor], **attributes: Any
) -> Iterator[None]:
    """Replace parameters and attributes of a module during a `with` block.

    Args:
        module: The module.
        tensors: Tensors, by the names of the parameters that they replace.
        attributes: Values, by the names of the attributes that they replace.
    """
    parameters = {name: direct_parameters(module).pop(name) for name in tensors}
    previous = {name: getattr(module, name) for name in attributes}
    module.__dict__.update(tensors | attributes)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            del module.__dict__[name]
            direct_parameters(module)[name] = parameter
        module.__dict__.update(previous)


def _matmul(
    module: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return F.linear(x, _out_in(module, weight), bias)


def _out_in(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight of the module as [out, in]."""
    # Transformers' Conv1D stores [in, out].
    return weight.t() if is_conv1d(module) else weight


def _weight(module: nn.Module) -> torch.Tensor:
    assert isinstance(module.weight, torch.Tensor)
    return local_tensor(module.weight)


def _bias(module: nn.Module) -> torch.Tensor | None:
    bias = getattr(module, "bias", None)
    return None if bias is None else local_tensor(bias)


def _out_dim(module: nn.Module) -> int:
    """Return the dimension of the output features in the stored weight."""
    return int(is_conv1d(module))


def _out_features(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return int(weight.shape[_out_dim(module)])


_OFFSET = 4
"""Amount by which the offset of a GPU's generator advances. It must be a multiple of 4."""


@dataclass
class SplitStream:
    """Random streams of one rank of tp. See Note [Random streams of tensor parallelism]."""

    rank: int
    _generator: torch.Generator | None = field(default=None, repr=False)
    """Generator of the current or last split part."""
    _own_seed: int | None = None
    """Seed of the current or last split part.

    The part lasts while the generator has this seed. `leave` is not called after some exceptions,
    but restoring the generator also changes its seed and thereby ends the part.
    """
    _resume: Callable[[], None] | None = field(default=None, repr=False)
    """Function that returns the generator to the shared stream."""
    _start: tuple[weakref.ref[torch.Tensor], Any] | None = field(default=None, repr=False)
    """First input of the split part and position of the generator at its beginning, if known."""

    def enter(self, like: torch.Tensor, *, read: torch.Tensor | None = None) -> None:
        """Begin a split part of the model, unless one has already begun.

        See Note [Random streams of tensor parallelism].

        Args:
            like: A tensor on the device of the part.
            read: The input of the layer that is called, if it is known.

        Raises:
            ModelError: Random numbers were drawn since the part began, and a layer in the part
                reads a replicated tensor other than the part's input. Dropout may have made this
                tensor different on each rank.
        """
        generator = _generator(like)
        if generator is None:
            return
        if generator.initial_seed() == self._own_seed:
            self._refuse_late_input(generator, read)
            return
        self._generator = generator
        seed, self._resume = _branch(generator)
        self._own_seed = (seed + (self.rank + 1) * GOLDEN_RATIO) & WORD_MASK
        generator.manual_seed(self._own_seed)
        self._start = None
        if read is not None:
            self._start = (weakref.ref(read), _position(generator))

    def leave(self) -> None:
        """End a split part, so that all ranks draw the same numbers again.

        Outside a split part this does nothing.
        """
        if (
            self._generator is not None
            and self._resume is not None
            and self._generator.initial_seed() == self._own_seed
        ):
            self._resume()
        self._generator = None
        self._resume = None
        self._start = None

    def _refuse_late_input(self, generator: torch.Generator, read: torch.Tensor | None) -> None:
        if read is None or self._start is None:
            return
        first_input, position = self._start
        if first_input() is not read and not _is_same_position(position, _position(generator)):
            raise ModelError(
                "tensor parallelism: random numbers were drawn (dropout) between two"
                " column-parallel layers that read different inputs, so every rank would drop"
                " different elements of a replicated tensor; call the column-parallel layers one"
                " after the other, or use the style 'colwise_gather_output' for the second one in"
                " parallel.plan"
            )


def _generator(like: torch.Tensor) -> torch.Generator | None:
    """Return the generator that dropout uses for `like`, or None for fake and meta tensors."""
    if isinstance(like, FakeTensor) or like.is_meta:
        return None
    if accelerator.is_accelerator(like.device):
        return accelerator.generator(like.device)
    if like.device.type == "cpu":
        return torch.default_generator
    return None


def _branch(generator: torch.Generator) -> tuple[int, Callable[[], None]]:
    """Return (unused seed of the shared stream, function that resumes the stream)."""
    if generator.device.type == "cpu":
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        state = generator.get_state()

        def restore() -> None:
            generator.set_state(state)

        return seed, restore
    # Seed and offset are numbers on the host, so no kernel runs and nothing waits for the device.
    shared_seed = generator.initial_seed()
    offset = generator.get_offset()

    def resume() -> None:
        generator.manual_seed(shared_seed)
        # The offset advances, so that the next part gets another seed.
        generator.set_offset(offset + _OFFSET)

    return _mixed(_mixed(shared_seed) ^ offset), resume


def _mixed(value: int) -> int:
    return mix_bits((value + GOLDEN_RATIO) & WORD_MASK)


def _position(generator: torch.Generator) -> Any:
    """Return the state of a CPU's generator, or the offset of a GPU's."""
    if generator.device.type == "cpu":
        return generator.get_state()
    return generator.get_offset()


def _is_same_position(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second)
