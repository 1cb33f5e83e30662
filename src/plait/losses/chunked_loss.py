"""Next-token cross entropy without full logits.

Note [Loss in chunks]
    The head and the loss are computed for one chunk of tokens at a time, which saves about 12 bytes
    per token and vocabulary entry. The forward computes the gradients of a chunk together with its
    loss, while the logits of the chunk exist, so the head is computed once. The gradients of the
    hidden states [tokens, hidden] and of the head's parameters are stored until the backward, which
    scales them. Gradients of parameters are accumulated in float32 or wider. If gradients are
    disabled (an evaluation), only the loss is computed. In float16 the chunks are computed again in
    the backward, which knows the loss scale.

    While the model runs, the head returns its own input instead of logits. Elementwise changes that
    the model makes to its logits afterwards (a soft cap, a scale, a cast) are recorded and applied
    to each chunk. All other changes are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from plait._torch.modules import has_tensor_hooks, hooks_of
from plait._torch.operators import tree_leaves
from plait._torch.passes import differentiable_once, keeps_graph, leaves_of_graph
from plait._torch.tensors import is_view, local_tensor, storage_key
from plait.attributes import override_attributes
from plait.errors import ModelError
from plait.losses.loss import CausalLMLoss, cross_entropy_sum
from plait.model.outer_layers import head_name
from plait.parallel.micro_batches import IGNORED, Forward, shift_labels
from plait.parallel.tensor.hook_checks import is_foreign
from plait.parallel.tensor.styles import Region

Head = Callable[[torch.Tensor], torch.Tensor]

_FULL_LOGITS = "compute full logits (parallel.loss_chunk_tokens = 0), and the loss from them"
"""Remedy for a loss whose gradient is differentiated."""


@dataclass(frozen=True)
class DeferredLogits:
    """Replacement for logits: a head that has not been applied yet, and its input."""

    hidden: torch.Tensor
    """Input of the head [batch, seq, hidden]."""
    head: Head
    """Function from hidden states [tokens, hidden] to logits [tokens, vocab].

    The logits are split over the vocabulary if the loss supports it.
    """
    parameters: tuple[nn.Parameter, ...]
    """Trainable parameters of the head."""

    def full(self) -> torch.Tensor:
        """Return the logits [batch, seq, vocab]."""
        logits = self.head(self.hidden.flatten(0, -2))
        return logits.unflatten(0, self.hidden.shape[:-1])


@dataclass(frozen=True)
class ChunkedCausalLMLoss(CausalLMLoss):
    """`CausalLMLoss` in chunks, for a model whose forward is the result of `deferred`.

    Value and gradients equal those of `CausalLMLoss`. Plain logits are accepted too.
    See Note [Loss in chunks].
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
        total = chunked_cross_entropy(logits, targets, chunk_tokens=self.chunk_tokens)
        return total, (targets != IGNORED).sum()


def chunked_causal_lm_loss(
    hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor, *, chunk_tokens: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the causal language model loss in chunks, for the user's own training loop.

    The result equals that of `plait.causal_lm_loss` on the output of `head`. Logits of at most
    `chunk_tokens` tokens are in memory at once.

    Args:
        hidden: Input of the head [batch, seq, hidden].
        head: The layer that computes logits.
        labels: [batch, seq] int64. They are shifted here (position t predicts label t + 1), and
            -100 is ignored.
        chunk_tokens: Tokens whose logits exist at the same time.

    Returns:
        (sum of the cross entropies, number of targets), both 0-dimensional.
    """
    targets = shift_labels(labels)
    deferred = DeferredLogits(hidden, head, tuple(p for p in head.parameters() if p.requires_grad))
    total = chunked_cross_entropy(deferred, targets, chunk_tokens=chunk_tokens)
    return total, (targets != IGNORED).sum()


def chunked_cross_entropy(
    logits: DeferredLogits, targets: torch.Tensor, *, chunk_tokens: int
) -> torch.Tensor:
    """Return the sum of the cross entropies over all targets, 0-dimensional.

    Args:
        logits: The head and its input.
        targets: [batch, seq] int64. `IGNORED` ones do not count.
        chunk_tokens: Tokens whose logits exist at the same time.
    """
    hidden = logits.hidden
    chunks = _chunks(hidden, targets, chunk_tokens)
    if not torch.is_grad_enabled() or not (hidden.requires_grad or logits.parameters):
        return _sum_of_chunks(logits.head, chunks)
    # The loss scale is known in the backward only.
    if _computes_in_float16(logits):
        return _GradientsInBackward.apply(hidden, targets, logits, chunk_tokens, *logits.parameters)

    value, gradients = _with_gradients(logits, chunks)
    total = value
    # One node of the graph per tensor: a pipeline that splits its backward computes them at
    # different times.
    for tensor, gradient in gradients:
        if gradient is not None:
            total = total + _KnownGradient.apply(tensor, gradient, value)
    return total


def _chunks(
    hidden: torch.Tensor, targets: torch.Tensor, size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return chunks of hidden states [tokens, hidden] and targets [tokens], in pairs."""
    hidden_chunks = hidden.reshape(-1, hidden.shape[-1]).split(size)
    return list(zip(hidden_chunks, targets.reshape(-1).split(size), strict=True))


def _sum_of_chunks(head: Head, chunks: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([cross_entropy_sum(head(chunk), targets) for chunk, targets in chunks]).sum()


def _computes_in_float16(logits: DeferredLogits) -> bool:
    """Return True if the head computes in float16.

    Gradients then overflow or vanish unless the loss scale is applied. The loss scale is known in
    the backward only, so the forward cannot compute the gradients.
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
    """Compute the sum of the losses of chunks, and its gradients times `factor`.

    Returns:
        The sum, and a pair (tensor, gradient) for every tensor that needs a gradient, parameters
        first. A parameter's gradient may be wider than the parameter, and is None if the head does
        not use the parameter.
    """
    hidden = logits.hidden
    parameters = logits.parameters
    hidden_gradient: torch.Tensor | None = None
    slices: Sequence[torch.Tensor] = ()
    if hidden.requires_grad:
        hidden_gradient = torch.empty_like(
            hidden, memory_format=torch.contiguous_format, requires_grad=False
        )
        slices = hidden_gradient.view(-1, hidden.shape[-1]).split(len(chunks[0][0]))

    losses: list[torch.Tensor] = []
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    for index, (chunk, targets) in enumerate(chunks):
        leaf = chunk.detach().requires_grad_(hidden.requires_grad)
        leaves: list[torch.Tensor] = [*parameters]
        if slices:
            leaves.append(leaf)
        # Hooks on saved tensors (checkpointing, offload) are for graphs that outlive the forward.
        with torch.enable_grad(), saved_tensors_hooks(_identity, _identity):
            loss = cross_entropy_sum(logits.head(leaf), targets)
            if index == 0:
                _refuse_lost_gradients(loss, leaves, parameters)
            chunk_gradients: list[torch.Tensor | None] = list(
                torch.autograd.grad(loss, leaves, factor, allow_unused=True)
            )
        losses.append(loss.detach())
        if slices:
            leaf_gradient = chunk_gradients.pop()
            if leaf_gradient is None:
                slices[index].zero_()
            else:
                slices[index].copy_(leaf_gradient)
        _accumulate(sums, chunk_gradients, widen=len(chunks) > 1)

    gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = list(
        zip(parameters, sums, strict=True)
    )
    if hidden_gradient is not None:
        gradients.append((hidden, hidden_gradient))
    return torch.stack(losses).sum(), gradients


def _accumulate(
    sums: list[torch.Tensor | None], gradients: Sequence[torch.Tensor | None], *, widen: bool
) -> None:
    """Add the gradients of a chunk to the sums in place. The sums share no memory."""
    storages = set()
    for position, gradient in enumerate(gradients):
        if gradient is None:
            continue
        total = sums[position]
        if total is not None:
            total.add_(gradient)
            continue

        first = gradient
        # 16-bit numbers lose digits when many are added.
        if widen and gradient.dtype in (torch.float16, torch.bfloat16):
            first = gradient.float()
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
    """Refuse a head whose gradients would be incomplete, or changed twice by a hook.

    Raises:
        ModelError: A gradient would be lost. The error contains the tensor's shape and a remedy.
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
                " requires a gradient but is not a parameter of the head, so its gradient would be"
                " lost; register it as a parameter of the head, or compute the loss in one piece"
                " (parallel.loss_chunk_tokens: 0)"
            )


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _KnownGradient(torch.autograd.Function):
    """Autograd function that returns 0, and whose backward returns a precomputed gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor, like: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = tensor.dtype
        return torch.zeros_like(like)

    @staticmethod
    @differentiable_once(_FULL_LOGITS)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # The gradient of a head is large, so it is scaled in place unless another pass through the
        # graph will read it.
        scaled = gradient * grad if keeps_graph() else gradient.mul_(grad)
        return scaled.to(ctx.dtype), None, None


class _GradientsInBackward(torch.autograd.Function):
    """Autograd function that sums the chunks' losses, and recomputes the chunks in the backward.

    The loss scale is applied before anything is rounded to float16. Otherwise the gradient of a
    weight could overflow in a single chunk, and a lower loss scale would not prevent it.
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
        return _sum_of_chunks(logits.head, _chunks(hidden, targets, chunk_tokens))

    @staticmethod
    @differentiable_once(_FULL_LOGITS)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
        logits = DeferredLogits(hidden, ctx.head, ctx.parameters)
        chunks = _chunks(hidden, targets, ctx.chunk_tokens)
        with ctx.autocast:
            _, pairs = _with_gradients(logits, chunks, grad)

        gradients: list[torch.Tensor | None] = []
        for tensor, gradient in pairs:
            if gradient is not None:
                gradient = gradient.to(tensor.dtype)
            gradients.append(gradient)
        hidden_gradient = gradients.pop() if hidden.requires_grad else None
        return hidden_gradient, None, None, None, *gradients


def deferred(forward: Forward, model: nn.Module) -> Forward:
    """Return a forward that defers the head of `model` to the loss. See Note [Loss in chunks].

    Args:
        forward: The forward of micro-batches.
        model: The model, for the name of its head.

    Raises:
        ModelError: The model does not name its head.
    """
    name = head_name(model)
    if name is None:
        raise ModelError(
            f"parallel.loss_chunk_tokens: {type(model).__name__} does not name the layer for"
            " its logits; add a method get_output_embeddings that returns that layer, or set"
            " parallel.loss_chunk_tokens to 0"
        )

    def run(model: nn.Module, batch: Any) -> Any:
        module = model.get_submodule(name)
        if any(is_foreign(hook) for hook in hooks_of(module, "forward").values()):
            raise ModelError(
                f"parallel.loss_chunk_tokens: {name} has a forward hook, which would see the head's"
                " input, because the loss computes the logits in chunks; remove the hook, or set"
                " parallel.loss_chunk_tokens to 0"
            )
        instance_forward = module.__dict__.get("forward")
        original: Head = module.forward
        recorder = _LogitsRecorder(f"parallel.loss_chunk_tokens: {type(model).__name__}")
        recording = ExitStack()

        def return_hidden(hidden: torch.Tensor) -> torch.Tensor:
            # A view would be the output of the full model, and torch warns of hooks on views. The
            # copy is small compared to the logits.
            if is_view(hidden) and torch.is_grad_enabled():
                hidden = hidden.clone()
            # The model runs without the mode until its head is called for the first time.
            if recorder.placeholder is None:
                recording.enter_context(recorder)
            recorder.start(hidden)
            return hidden

        module.forward = return_hidden
        try:
            with recording:
                output = forward(model, batch)
        finally:
            if instance_forward is None:
                del module.__dict__["forward"]
            else:
                module.forward = instance_forward

        logits = getattr(output, "logits", None)
        if logits is None or logits is not recorder.placeholder:
            raise ModelError(
                f"parallel.loss_chunk_tokens: {type(model).__name__} changes the output of its"
                f" {name} by more than elementwise operations, so the loss cannot compute the"
                " logits in chunks; use 0"
            )
        parameters = tuple(p for p in module.parameters() if p.requires_grad)
        head = recorder.with_changes(_with_current_gathering(original))
        output.logits = DeferredLogits(output.logits, head, parameters)
        return output

    return run


def _with_current_gathering(head: Head) -> Head:
    """Return the head with the current setting of `Region.gather_logits`.

    The setting may have changed when a backward applies the head.
    """
    region: Region | None = getattr(head, "region", None)
    if region is None:
        return head
    gather_logits = region.gather_logits

    def apply(hidden: torch.Tensor) -> torch.Tensor:
        with override_attributes(region, gather_logits=gather_logits):
            return head(hidden)

    return apply


class _LogitsRecorder(TorchFunctionMode):
    """TorchFunctionMode that records the operations on a placeholder for logits.

    The recorded operations are not executed.
    """

    def __init__(self, subject: str) -> None:
        super().__init__()
        self.subject = subject
        """Subject of the error for an operation that is not supported."""
        self.placeholder: torch.Tensor | None = None
        """Hidden states that the head returned, or None if it has not been called."""
        self.changes: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def start(self, placeholder: torch.Tensor) -> None:
        """Record the operations on this placeholder, and forget those on an earlier one."""
        self.placeholder = placeholder
        self.changes.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        placeholder = self.placeholder
        if (
            placeholder is None
            or name in _QUERIES
            or not any(leaf is placeholder for leaf in tree_leaves((args, kwargs)))
        ):
            return func(*args, **kwargs)

        position = next(
            (index for index, argument in enumerate(args) if argument is placeholder), None
        )
        operands = [argument for index, argument in enumerate(args) if index != position]
        operands.extend(kwargs.values())
        if (
            position is None
            or name.strip("_") not in _ELEMENTWISE
            or not all(_is_constant(operand) for operand in operands)
        ):
            raise ModelError(
                f"{self.subject} does `{name}` to its logits, but a loss in chunks never allocates"
                " them in full, and supports only elementwise changes with constants (a scale, a"
                " soft cap, a cast); use 0"
            )

        def change(logits: torch.Tensor) -> torch.Tensor:
            return func(*args[:position], logits, *args[position + 1 :], **kwargs)

        self.changes.append(change)
        return placeholder

    def with_changes(self, head: Head) -> Head:
        """Return the head followed by the recorded operations."""
        if not self.changes:
            return head

        def apply(hidden: torch.Tensor) -> torch.Tensor:
            logits = head(hidden)
            for change in self.changes:
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
        "neg",
        "tanh",
        "float",
        "double",
        "half",
        "bfloat16",
        "to",
        "type",
        "clone",
        "contiguous",
    }
)
_QUERIES = frozenset(
    {"__get__", "register_hook", "is_floating_point", "is_complex", "_is_view", "__hash__"}
)
"""Functions by which `fully_shard` and models query a tensor without changing it."""


def _is_constant(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.requires_grad
    return isinstance(
        value, bool | int | float | str | torch.dtype | torch.device | torch.memory_format | None
    )
