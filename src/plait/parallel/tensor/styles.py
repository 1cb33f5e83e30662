"""How one module computes with its share of the weights: a function for every style, put in place
of the module's own forward.

Weights are DTensors over the tp axis (so that sharding, checkpoints and clipping know the global
tensor), but computation is on plain local tensors with the collectives of `comm.collectives`: fewer
dispatches than DTensor arithmetic, and every collective is visible here.

Siblings that read the same input (q, k, v; gate, up) share one copy to the tensor-parallel region
(`RegionInput`), so the input is gathered, and its gradient reduced, once.
"""

from __future__ import annotations

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

from plait._torch.dtensor import local_tensor
from plait._torch.modules import hooks_of, own_parameters
from plait.comm.collectives import (
    enter,
    gather,
    gather_sum,
    leave,
    leave_scatter,
    shard_range,
    split,
)
from plait.model.layers import is_conv1d
from plait.parallel.containers import rebuilt
from plait.parallel.tensor.hook_checks import is_foreign
from plait.parallel.tensor.overlap import Weight, enter_overlapped, product, summed_product
from plait.parallel.tensor.random_streams import SplitStream

SEQUENCE = 1
"""The dimension of hidden states [batch, seq, hidden] that sequence parallelism shards."""


@dataclass
class Region:
    """What all modules of a model share: the tp group, and the length of the sequence where hidden
    states are sharded along it.
    """

    group: ProcessGroup
    mesh: DeviceMesh
    sequence_parallel: bool = False
    length: int = 0
    """Global length of the sequence-sharded dimension in the current forward."""
    overlap: int = 0
    """Chunks of a row-parallel product whose all-reduce overlaps with the next; all-reduces of
    gradients overlap too then. 0: neither is.
    """
    gather_logits: bool = True
    """Whether the head gathers its logits over the vocabulary (any caller can use them) or leaves
    them sharded for the loss.
    """
    loss_parallel: bool = True
    """Whether a loss that can may have them so."""
    own_random: Literal["parts", "blocks", "nothing"] = "parts"
    """Where a rank draws random numbers of its own: from a column-parallel layer to the
    row-parallel one after it, or in all of a block that works on sequence shards.
    """
    stream: SplitStream = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.stream = SplitStream(self.group.rank())

    def serve(self, loss_fn: object) -> None:
        """The head leaves its logits split over the vocabulary where `loss_fn` can use them so."""
        self.gather_logits = not (self.loss_parallel and getattr(loss_fn, "split_logits", False))

    def enter_part(self, module: nn.Module, like: torch.Tensor, *, read: torch.Tensor) -> None:
        """`module`, a column-split layer, has computed its part `like` of what it reads."""
        if self.own_random == "parts" and module.training:
            self.stream.enter(like, read=read)

    def leave_part(self) -> None:
        """A row-split layer reads the part."""
        if self.own_random == "parts":
            self.stream.leave()


@dataclass
class RegionInput:
    """The copy to the tensor-parallel region that siblings share (Megatron's f). `uses` of them
    read the same tensor, one after the other.
    """

    region: Region
    sequence: bool = False
    """The input is sharded along the sequence."""
    opened: bool = False
    """The copy of a container (see `gather_at`) has prepared the input already."""
    uses: int = 1
    siblings: list[nn.Module] = field(default_factory=list, repr=False)
    """Layers that compute with their own columns of their weight."""
    _deferred: dict[int, Weight] = field(default_factory=dict, repr=False)
    """Weights of this entering whose layers were not called yet."""
    _seen: torch.Tensor | None = field(default=None, repr=False)
    _entered: torch.Tensor | None = field(default=None, repr=False)
    _left: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The input as column-parallel layers need it: unsharded, its gradient summed over the
        ranks.
        """
        if self.opened:
            return x
        if self._seen is x and self._left:
            entered = self._entered
            self._left -= 1
        else:
            entered = self._enter(x)
            self._seen = x
            self._entered = entered
            self._left = self.uses - 1
        if not self._left:
            self._seen = self._entered = (
                None  # the last sibling has read it: do not keep activations alive
            )
        assert entered is not None
        return entered

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        self._deferred = {}
        if self.sequence:
            return gather_sum(x, self.region.group, dim=SEQUENCE, length=self.region.length)
        if not (self.region.overlap and self.siblings and x.requires_grad):
            return enter(x, self.region.group)
        weights = {id(module): _out_in(module, _weight(module)) for module in self.siblings}
        trained = {key: weight for key, weight in weights.items() if weight.requires_grad}
        entered, self._deferred = enter_overlapped(x, self.region.group, trained)
        return entered

    def deferred(self, module: nn.Module) -> Weight | None:
        """The weight of a sibling that has just entered, if its gradient is overlapped with the
        all-reduce of the input's.
        """
        return self._deferred.pop(id(module), None)


Forward = Callable[..., torch.Tensor]


def _matmul(
    module: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return F.linear(x, _out_in(module, weight), bias)


def _out_in(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """A weight of the module as [out, in]."""
    return weight.t() if is_conv1d(module) else weight


def colwise(
    module: nn.Module, region: Region, region_input: RegionInput, *, begins: bool
) -> Forward:
    """Own columns of the output. `begins`: a row-split layer behind it ends what the ranks compute
    in parts.
    """
    region_input.siblings.append(module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        entered = region_input(x)
        deferred = region_input.deferred(module)
        if deferred is not None:
            y = product(entered, deferred, _bias(module))
        else:
            y = _matmul(module, entered, _weight(module), _bias(module))
        if begins:
            region.enter_part(module, y, read=x)
        return y

    return forward


def colwise_gather_output(module: nn.Module, region: Region, region_input: RegionInput) -> Forward:
    """Own columns, then all of them on every rank."""
    features = _out_features(module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = _matmul(module, region_input(x), _weight(module), _bias(module))
        return gather(y, region.group, dim=-1, length=features)

    return forward


def rowwise(module: nn.Module, region: Region, *, split_input: bool, sequence: bool) -> Forward:
    """Own rows of the weight on own features of the input; the partial outputs are summed, then the
    bias is added once.
    """

    def forward(x: torch.Tensor) -> torch.Tensor:
        region.leave_part()
        if split_input:
            x = split(x, region.group, dim=-1)
        if region.overlap and not sequence:
            y = summed_product(
                x, _out_in(module, _weight(module)), region.group, pieces=region.overlap
            )
        else:
            y = _matmul(module, x, _weight(module), None)
            y = leave_scatter(y, region.group, dim=SEQUENCE) if sequence else leave(y, region.group)
        bias = getattr(module, "bias", None)
        if bias is None:
            return y
        # On sequence shards every rank sees its own tokens only, so the bias's gradient is summed
        # over them.
        return y + (enter(local_tensor(bias), region.group) if sequence else local_tensor(bias))

    return forward


def embedding_rowwise(module: nn.Embedding, region: Region) -> Forward:
    """Own rows of the vocabulary. Every token is some rank's own; that rank's result counts, the
    others add zeros, and the sum over ranks is the embedding. The module's own forward computes it,
    so a subclass that scales its rows is right too.
    """
    original = module.forward
    start, size = shard_range(module.num_embeddings, region.group)
    padding = module.padding_idx
    local_padding = (
        padding - start if padding is not None and start <= padding < start + size else None
    )

    def forward(ids: torch.Tensor) -> torch.Tensor:
        weight = _weight(module)
        if not size:  # more ranks than rows: no token is this rank's own
            return leave(weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum(), region.group)
        own = (ids >= start) & (ids < start + size)
        with own_values(module, {"weight": weight}, padding_idx=local_padding):
            hidden = original((ids - start).masked_fill(~own, 0))
        return leave(hidden * own.unsqueeze(-1), region.group)

    return forward


def vocab_head(module: nn.Module, region: Region, region_input: RegionInput) -> Forward:
    """Own columns of the logits: gathered, or left as a DTensor sharded over the vocabulary for a
    loss that knows what to do with it.
    """
    features = _out_features(module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = _matmul(module, region_input(x), _weight(module), _bias(module))
        hooks = (*hooks_of(module, "forward").values(), *hooks_of(module, "backward").values())
        # A hook of the user receives and returns the logits of the full vocabulary.
        if region.gather_logits or any(is_foreign(hook) for hook in hooks):
            return gather(y, region.group, dim=-1, length=features)
        shape = torch.Size((*y.shape[:-1], features))
        stride = tuple(torch.empty(shape, device="meta").stride())
        return DTensor.from_local(
            y, region.mesh, [Shard(y.ndim - 1)], run_check=False, shape=shape, stride=stride
        )

    forward.__dict__["region"] = region  # for a loss that applies the head itself
    return forward


def gather_at(module: nn.Module, region: Region) -> None:
    """Gather the sequence-sharded first input of a container (attention, MLP), which derives shapes
    and positions from it.
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


def compute_whole(module: nn.Module, region: Region) -> None:
    """Compute a part of a block on all tokens, the same on every rank: its sequence-sharded first
    input is gathered, and each rank keeps its own tokens of the output, alone or the first of a
    tuple. The gradient of the output is gathered too, so every rank has those of the parameters in
    full, and its own tokens of the input's.
    """

    def gather_input(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return on_hidden(
            lambda hidden: gather(hidden, region.group, dim=SEQUENCE, length=region.length),
            args,
            kwargs,
        )

    def keep_own(_module: nn.Module, _args: object, output: Any) -> Any:
        if isinstance(output, tuple | list):
            return rebuilt(
                output, {**dict(enumerate(output)), 0: split(output[0], region.group, dim=SEQUENCE)}
            )
        return split(output, region.group, dim=SEQUENCE)

    module.register_forward_pre_hook(gather_input, with_kwargs=True, prepend=True)
    module.register_forward_hook(keep_own)


def on_hidden(
    change: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change the hidden states among a forward's arguments: the first positional one, or
    `hidden_states`.
    """
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def summed_gradient(module: nn.Module, region: Region) -> Forward:
    """A replicated module whose ranks see different tokens or heads: its own forward, with
    parameter gradients summed over tp.
    """
    original = module.forward
    names = [name for name, _ in module.named_parameters(recurse=False)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        with own_values(
            module, {name: enter(getattr(module, name), region.group) for name in names}
        ):
            return original(*args, **kwargs)

    return forward


@contextmanager
def own_values(
    module: nn.Module, tensors: dict[str, torch.Tensor], **attributes: Any
) -> Iterator[None]:
    """For the length of a call, `module.name` is the given tensor instead of the parameter, and
    attributes are as given.
    """
    parameters = {name: own_parameters(module).pop(name) for name in tensors}
    before = {name: getattr(module, name) for name in attributes}
    module.__dict__.update(tensors | attributes)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            del module.__dict__[name]
            own_parameters(module)[name] = parameter
        module.__dict__.update(before)


def kv_replicated(
    module: nn.Module, region: Region, region_input: RegionInput, *, heads: int, begins: bool
) -> Forward:
    """A key or value projection with fewer heads than ranks: the weight is replicated, each rank
    computes the one head that its queries use. `begins` as in `colwise`.
    """
    ranks = region.group.size()
    rank = region.group.rank()
    head = rank * heads // ranks
    rows = _out_features(module) // heads

    def forward(x: torch.Tensor) -> torch.Tensor:
        dim = 1 if is_conv1d(module) else 0
        weight = enter(_weight(module), region.group).narrow(dim, head * rows, rows)
        bias = getattr(module, "bias", None)
        if bias is not None:
            bias = enter(local_tensor(bias), region.group).narrow(0, head * rows, rows)
        y = _matmul(module, region_input(x), weight, bias)
        if begins:
            region.enter_part(module, y, read=x)
        return y

    return forward


def _weight(module: nn.Module) -> torch.Tensor:
    assert isinstance(module.weight, torch.Tensor)
    return local_tensor(module.weight)


def _bias(module: nn.Module) -> torch.Tensor | None:
    bias = getattr(module, "bias", None)
    return None if bias is None else local_tensor(bias)


def _out_features(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return int(weight.shape[1 if is_conv1d(module) else 0])
