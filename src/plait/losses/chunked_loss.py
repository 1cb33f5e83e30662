"""Next-token cross entropy without full logits.

The head and the loss are computed for one chunk of tokens at a time, which saves about 12 bytes per
token and vocabulary entry. The forward computes the gradients of a chunk together with its loss,
while the logits of the chunk exist, so the head is computed once. The gradients of the hidden
states [tokens, hidden] and of the head's parameters are stored until the backward, which scales
them. Gradients of parameters are accumulated in float32 or wider. If gradients are disabled (an
evaluation), only the loss is computed. In float16 the chunks are computed again in the backward,
which knows the loss scale.

While the model runs, its head returns its input. Elementwise changes that the model makes to its
logits afterwards (a soft cap, a scale, a cast) are recorded and applied to each chunk. All other
changes are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from plait._torch.dtensor import local_tensor
from plait._torch.modules import has_tensor_hooks, hooks_of
from plait._torch.operators import tree_leaves
from plait._torch.passes import keeps_graph, leaves_of_graph
from plait._torch.storage import is_view, storage_key
from plait.errors import ModelError
from plait.losses.loss import CausalLMLoss, cross_entropy_sum
from plait.model.boundary_layers import head_name
from plait.parallel.micro_batches import IGNORED, Forward, shifted
from plait.parallel.tensor.hook_checks import is_foreign
from plait.parallel.tensor.styles import Region

Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DeferredLogits:
    """What stands in place of logits: the head, not yet applied."""

    hidden: torch.Tensor
    """The head's input [batch, seq, hidden]."""
    head: Head
    """Gives logits [tokens, vocab] of hidden states [tokens, hidden]; split over the vocabulary
    where a loss can use them so.
    """
    parameters: tuple[nn.Parameter, ...]
    """The head's own that are trained."""

    def full(self) -> torch.Tensor:
        """Return the logits [batch, seq, vocab]."""
        logits = self.head(self.hidden.flatten(0, -2))
        return logits.unflatten(0, self.hidden.shape[:-1])


@dataclass(frozen=True)
class ChunkedCausalLMLoss(CausalLMLoss):
    """`CausalLMLoss`, value and gradients, for a model whose forward is `deferred`. Takes plain
    logits too.
    """

    split_logits: ClassVar[bool] = True
    chunk_tokens: int = 1024
    """Tokens whose logits exist at the same time."""

    def __call__(
        self, output: Any, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = output.logits
        if not isinstance(logits, DeferredLogits):
            return super().__call__(output, batch)
        targets = self._targets(batch)
        return (
            chunked_cross_entropy(logits, targets, chunk_tokens=self.chunk_tokens),
            (targets != IGNORED).sum(),
        )


def chunked_causal_lm_loss(
    hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor, *, chunk_tokens: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the cross entropies, number of targets) for your own training loop.

    `hidden` [batch, seq, hidden] is the input of `head`, the layer that makes logits; `labels`
    [batch, seq] int64 are shifted here (position t predicts label t + 1), -100 ignored. The same as
    applying the head and `plait.causal_lm_loss`, in the memory of `chunk_tokens` tokens.
    """
    targets = shifted(labels)
    deferred = DeferredLogits(hidden, head, tuple(p for p in head.parameters() if p.requires_grad))
    return (
        chunked_cross_entropy(deferred, targets, chunk_tokens=chunk_tokens),
        (targets != IGNORED).sum(),
    )


def chunked_cross_entropy(
    logits: DeferredLogits, targets: torch.Tensor, *, chunk_tokens: int
) -> torch.Tensor:
    """Sum over targets, 0-dimensional. `targets` [batch, seq] int64, `IGNORED` ones count for
    nothing.
    """
    hidden = logits.hidden
    chunks = _chunks(hidden, targets, chunk_tokens)
    if not torch.is_grad_enabled() or not (hidden.requires_grad or logits.parameters):
        return torch.stack(
            [cross_entropy_sum(logits.head(chunk), wanted) for chunk, wanted in chunks]
        ).sum()
    if _computes_in_float16(logits):
        return _GradientsInBackward.apply(hidden, targets, logits, chunk_tokens, *logits.parameters)

    value, gradients = _with_gradients(logits, chunks)
    total = value
    # One node of the graph per tensor: a pipeline that splits its backward asks for them at
    # different times.
    for tensor, gradient in gradients:
        if gradient is not None:
            total = total + _KnownGradient.apply(tensor, gradient, value)
    return total


def _chunks(
    hidden: torch.Tensor, targets: torch.Tensor, size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(
        zip(
            hidden.reshape(-1, hidden.shape[-1]).split(size),
            targets.reshape(-1).split(size),
            strict=True,
        )
    )


def _computes_in_float16(logits: DeferredLogits) -> bool:
    """Whether gradients overflow or vanish unless they are computed with the loss scale, which only
    the backward knows.
    """
    device = logits.hidden.device.type
    autocast = (
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
    )
    return autocast or any(
        tensor.dtype is torch.float16 for tensor in (logits.hidden, *logits.parameters)
    )


def _with_gradients(
    logits: DeferredLogits,
    chunks: Sequence[tuple[torch.Tensor, torch.Tensor]],
    factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """(the sum, every tensor that needs a gradient with the gradient of the sum times `factor`). A
    parameter's gradient may be wider than it is, and is None where the head does not use the
    parameter.
    """
    hidden = logits.hidden
    parameters = logits.parameters
    gradient: torch.Tensor | None = None
    slices: Sequence[torch.Tensor] = ()
    if hidden.requires_grad:
        gradient = torch.empty_like(
            hidden, memory_format=torch.contiguous_format, requires_grad=False
        )
        slices = gradient.view(-1, hidden.shape[-1]).split(len(chunks[0][0]))

    losses: list[torch.Tensor] = []
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    for index, (chunk, wanted) in enumerate(chunks):
        leaf = chunk.detach().requires_grad_(hidden.requires_grad)
        # Hooks on saved tensors (checkpointing, offload) are for graphs that outlive the forward.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            loss = cross_entropy_sum(logits.head(leaf), wanted)
            leaves = [leaf, *parameters] if slices else [*parameters]
            if index == 0:
                _refuse_lost_gradients(loss, leaves, parameters)
            found = list(torch.autograd.grad(loss, leaves, factor, allow_unused=True))
        losses.append(loss.detach())
        if slices:
            part = found.pop(0)
            slices[index].copy_(0 if part is None else part)
        _add(sums, found, widen=len(chunks) > 1)

    gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = list(
        zip(parameters, sums, strict=True)
    )
    if gradient is not None:
        gradients.append((hidden, gradient))
    return torch.stack(losses).sum(), gradients


def _add(
    sums: list[torch.Tensor | None], found: Sequence[torch.Tensor | None], *, widen: bool
) -> None:
    """Add a chunk's gradients to the sums, which are changed in place and therefore share no
    memory.
    """
    storages = set()
    for position, part in enumerate(found):
        if part is None:
            continue
        before = sums[position]
        if before is not None:
            before.add_(part)
            continue
        # Halves lose digits when many are added up.
        first = _widened(part) if widen else part
        storage = storage_key(first)
        if storage in storages or 0 in local_tensor(first).stride():
            # Autograd gives both terms of a sum the same gradient, and those of a broadcast tensor
            # an expanded one.
            first = first.clone(memory_format=torch.contiguous_format)
        storages.add(storage)
        sums[position] = first


def _refuse_lost_gradients(
    loss: torch.Tensor, leaves: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]
) -> None:
    """Raise ModelError for a tensor of the head that trains and whose gradient would be left out or
    be changed twice.
    """
    for parameter in parameters:
        if has_tensor_hooks(parameter):
            raise ModelError(
                f"a loss in chunks: a parameter of the head, of shape {tuple(parameter.shape)}, has"
                " a hook on its gradient (register_hook), which would be called for every chunk"
                " and again for the sum; use register_post_accumulate_grad_hook, or compute the"
                " loss in one piece (parallel.loss_chunk_tokens: 0)"
            )
    known = {id(leaf) for leaf in leaves}
    for tensor in leaves_of_graph(loss):
        if id(tensor) not in known:
            raise ModelError(
                f"a loss in chunks: the head uses a tensor of shape {tuple(tensor.shape)} that"
                " trains and is none of the head's own parameters, whose gradient would be left"
                " out; register it as a parameter of the head, or compute the loss in one piece"
                " (parallel.loss_chunk_tokens: 0)"
            )


def _widened(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _KnownGradient(torch.autograd.Function):
    """Zero, whose gradient for a tensor is one that is known already."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor, like: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = tensor.dtype
        return torch.zeros_like(like)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # Without a further pass through the graph nothing else reads it, and a head's gradient is
        # large.
        scaled = gradient * grad if keeps_graph() else gradient.mul_(grad)
        return scaled.to(ctx.dtype), None, None


class _GradientsInBackward(torch.autograd.Function):
    """The sum, whose chunks are computed again in the backward, multiplied by the loss scale before
    anything is rounded to float16.

    Without the scale, the weight's gradient of one chunk can overflow where no lower loss scale
    would help.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        logits: DeferredLogits,
        chunk_tokens: int,
        *_: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, targets)
        ctx.head = logits.head
        ctx.parameters = logits.parameters
        ctx.chunk_tokens = chunk_tokens
        device = hidden.device.type
        ctx.autocast = torch.autocast(
            device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device)
        )
        chunks = _chunks(hidden, targets, chunk_tokens)
        return torch.stack(
            [cross_entropy_sum(logits.head(chunk), wanted) for chunk, wanted in chunks]
        ).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
        logits = DeferredLogits(hidden, ctx.head, ctx.parameters)
        with ctx.autocast:
            _, gradients = _with_gradients(logits, _chunks(hidden, targets, ctx.chunk_tokens), grad)
        found = [
            None if gradient is None else gradient.to(tensor.dtype)
            for tensor, gradient in gradients
        ]
        of_hidden = found.pop() if hidden.requires_grad else None
        return of_hidden, None, None, None, *found


def deferred(forward: Forward, model: nn.Module) -> Forward:
    """`forward`, leaving the head of `model` to the loss.

    Raises ModelError where the model does not name its head.
    """
    name = head_name(model)
    if name is None:
        raise ModelError(
            f"parallel.loss_chunk_tokens: {type(model).__name__} does not name the layer that makes"
            " its logits; give it a method get_output_embeddings that returns it, or use 0"
        )

    def run(whole: nn.Module, batch: Any) -> Any:
        module = whole.get_submodule(name)
        if any(is_foreign(hook) for hook in hooks_of(module, "forward").values()):
            raise ModelError(
                f"parallel.loss_chunk_tokens: {name} has a forward hook, which would see the head's"
                " input, because the loss computes the logits in chunks; remove the hook, or use 0"
            )
        own = module.__dict__.get("forward")
        original: Head = module.forward
        given: list[torch.Tensor] = []

        def return_hidden(hidden: torch.Tensor) -> torch.Tensor:
            # A view would be the output of the full model, and torch warns of hooks on views; the
            # copy is small compared to the logits.
            given.append(hidden.clone() if is_view(hidden) and torch.is_grad_enabled() else hidden)
            changes.noted.clear()
            if len(given) == 1:  # the rest of the model runs without being watched
                watched.enter_context(changes)
            return given[-1]

        watched = ExitStack()
        changes = _Changes(given, f"parallel.loss_chunk_tokens: {type(whole).__name__}")
        module.forward = return_hidden
        try:
            with watched:
                output = forward(whole, batch)
        finally:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.forward = own
        if not given or getattr(output, "logits", None) is not given[-1]:
            raise ModelError(
                f"parallel.loss_chunk_tokens: the logits of {type(whole).__name__} are not what its"
                f" {name} returns, changed elementwise at most, so its head cannot be left to the"
                " loss; use 0"
            )
        trained = tuple(p for p in module.parameters() if p.requires_grad)
        output.logits = DeferredLogits(given[-1], changes.after(_as_now(original)), trained)
        return output

    return run


def _as_now(head: Head) -> Head:
    """The head, whose logits are gathered or stay split over the vocabulary as they are now, also
    when a backward applies it.
    """
    region: Region | None = getattr(head, "region", None)
    if region is None:
        return head
    gather = region.gather_logits

    def apply(hidden: torch.Tensor) -> torch.Tensor:
        before = region.gather_logits
        region.gather_logits = gather
        try:
            return head(hidden)
        finally:
            region.gather_logits = before

    return apply


class _Changes(TorchFunctionMode):
    """Notes what is done to the one tensor of `given`, which stands for logits, and does not do
    it.
    """

    def __init__(self, given: list[torch.Tensor], who: str) -> None:
        super().__init__()
        self.given = given
        self.who = who
        self.noted: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stands = self.given[-1] if self.given else None
        name = getattr(func, "__name__", "")
        if (
            stands is None
            or name in _LOOKS
            or not any(leaf is stands for leaf in tree_leaves((args, kwargs)))
        ):
            return func(*args, **kwargs)
        at = next((index for index, argument in enumerate(args) if argument is stands), None)
        others = [leaf for index, leaf in enumerate(args) if index != at] + list(kwargs.values())
        if (
            at is None
            or name.strip("_") not in _ELEMENTWISE
            or not all(_is_constant(other) for other in others)
        ):
            raise ModelError(
                f"{self.who} does `{name}` to its logits, and with a loss in chunks they are never"
                " allocated in full: what is done to them elementwise with constants (a scale, a"
                " soft cap, a cast) is supported; use 0"
            )
        self.noted.append(lambda logits: func(*args[:at], logits, *args[at + 1 :], **kwargs))
        return stands

    def after(self, head: Head) -> Head:
        """The head, and what was noted."""
        if not self.noted:
            return head

        def apply(hidden: torch.Tensor) -> torch.Tensor:
            logits = head(hidden)
            for change in self.noted:
                logits = change(logits)
            return logits

        return apply


_ELEMENTWISE = frozenset(
    {
        "mul",
        "rmul",
        "imul",
        "multiply",
        "div",
        "truediv",
        "itruediv",
        "idiv",
        "true_divide",
        "divide",
        "add",
        "radd",
        "iadd",
        "sub",
        "isub",
    }
    | {"neg", "tanh", "float", "double", "half", "bfloat16", "to", "type", "clone", "contiguous"}
)
_LOOKS = frozenset(
    {"__get__", "register_hook", "is_floating_point", "is_complex", "_is_view", "__hash__"}
)
"""What fully_shard and models ask a tensor for, which changes nothing."""


def _is_constant(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.requires_grad
    return isinstance(
        value, bool | int | float | str | torch.dtype | torch.device | torch.memory_format | None
    )
