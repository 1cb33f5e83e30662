"""Patched behaviour of `fully_shard`: the order in which units are gathered and reduced.

Note [Order of units]
    Gathering and reducing a unit are collectives, and a process group matches the collectives of
    its ranks only by their order. Ranks that skip different blocks (LayerDrop, stochastic depth,
    samples without an image) would therefore exchange the weights and gradients of different
    blocks. Neither torch nor NCCL nor gloo detects this if the shapes agree.

    Where units stay gathered after the forward (ZeRO stages 1 and 2), each unit is gathered once
    and reduced once per pass, so a fixed order removes the problem. Before a unit is gathered, all
    units in front of it are gathered. The end of the model's forward gathers the remaining ones. A
    unit is reduced when all units behind it have been reduced, and the end of the backward reduces
    the remaining ones. A unit without gradients reduces zeros. Models that run their blocks in the
    order of registration issue the same collectives as without this patch. A step that skips a
    block keeps the gradients of the blocks in front of it unsharded until the end of the backward.

    An evaluation between forward and backward may have freed units, so the beginning of the
    backward gathers all of them. Nothing is gathered after that. Otherwise torch, which remembers
    the order of all forwards, would prefetch units that are reduced already, and leave them
    gathered. A block with several calls in a forward is reduced when the backwards of all of them
    have ended.

    At stage 3 units are gathered for every use. Their order cannot be fixed, but it is recorded,
    and the ranks compare a digest of it once per step.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from plait._torch.passes import around_backward
from plait._torch.units import parameter_groups, sharded_modules

DIGEST_BITS = 32
"""Size of `UnitOrder.digest`."""
MOST_COLLECTIVES = 1 << 14
"""Largest number of collectives that `UnitOrder.take` returns. The digest covers older ones too."""
_MULTIPLIER = 0x9E3779B1
"""Odd factor that makes the digest depend on the order."""
_LAST_ISSUER: list[weakref.ref[UnitOrder]] = []
"""Weak reference to the `UnitOrder` that has issued the latest collective. At most one entry."""


def last_collective() -> str:
    """Return the latest unit collective in any model, for example `gathering of blocks.1`.

    The result is an empty string before the first one.
    """
    order = _LAST_ISSUER[0]() if _LAST_ISSUER else None
    return order.last if order is not None else ""


class UnitOrder:
    """Record of the collectives of a sharded model's units. It can also fix their order.

    Args:
        root: The sharded model.
        is_fixed: Whether all ranks gather and reduce all units in one order, see
            Note [Order of units]. Units must then stay gathered after the forward.
        embeddings: Units that torch reduces at the end of the backward, because their inputs have
            no gradient.
        heads: Units that run after all others.
    """

    def __init__(
        self,
        root: FSDPModule,
        *,
        is_fixed: bool,
        embeddings: Sequence[FSDPModule] = (),
        heads: Sequence[FSDPModule] = (),
    ) -> None:
        assert isinstance(root, nn.Module)
        self._is_fixed = is_fixed
        self._reference = weakref.ref(self)
        outer = {root, *embeddings, *heads}
        blocks = [module for module in sharded_modules(root) if module not in outer]
        modules = [root, *embeddings, *blocks, *heads]
        pairs = [(module, group) for module in modules for group in parameter_groups(module)]
        names: dict[Any, str] = {module: name for name, module in root.named_modules()}
        self._names = [names[module] or "the parameters outside the blocks" for module, _ in pairs]
        self._states: list[Any] = [module._get_fsdp_state() for module, _ in pairs]
        self._groups = [group for _, group in pairs]
        self._reductions: list[Callable[..., None]] = [
            group.post_backward for group in self._groups
        ]
        # Bounded, because evaluations append to it and only training steps empty it.
        self._collectives: deque[int] = deque(maxlen=MOST_COLLECTIVES)
        """Code of each collective: twice the index of the unit, plus 1 for a reduction."""
        self._digest = 0
        self._awaits_reduction = [False] * len(self._groups)
        """True for each unit whose backward has run and whose reduction waits for later units."""
        self._calls = [0] * len(self._groups)
        """Number of calls of each block whose backward has not run."""
        self._runs_backward = False
        self._unreduced = len(self._groups)
        """Number of units, from the front, that the running backward has not reduced yet."""

        counted = set(blocks) if is_fixed else set()
        for index, (module, group) in enumerate(pairs):
            group.unshard = self._ordered_gather(index, group.unshard)
            group.post_backward = self._ordered_reduction(index)
            if module in counted:
                register = group._register_post_backward_hook
                group._register_post_backward_hook = self._counted_registration(index, register)
        if is_fixed:
            root.register_forward_hook(self._gather_remaining, prepend=True)
            around_backward(root, begin=self._begin_backward, before_end=self._reduce_remaining)

    @property
    def digest(self) -> int:
        """Hash of the collectives since the last `take`, in their order."""
        return self._digest

    @property
    def last(self) -> str:
        """The latest collective, for example `gathering of blocks.1`, or an empty string."""
        if not self._collectives:
            return ""
        return self._description(self._collectives[-1])

    def take(self) -> list[int]:
        """Return the collectives since the previous call, and forget them.

        Returns:
            Codes of the newest `MOST_COLLECTIVES` collectives, for `difference`.
        """
        collectives = list(self._collectives)
        self._collectives.clear()
        self._digest = 0
        return collectives

    def difference(self, collectives: Sequence[Sequence[int]]) -> list[str]:
        """Describe the first collective in which ranks differ.

        Args:
            collectives: Result of `take` on each rank.

        Returns:
            One description per rank, for example `gathering of blocks.1`, or `nothing` if the rank
            has issued no further collective. Empty if all ranks have issued the same collectives.
        """
        for position in range(max(map(len, collectives))):
            codes = [codes[position] if position < len(codes) else None for codes in collectives]
            if len(set(codes)) > 1:
                return ["nothing" if code is None else self._description(code) for code in codes]
        return []

    def _description(self, code: int) -> str:
        index, is_reduction = divmod(code, 2)
        return f"{'reduction' if is_reduction else 'gathering'} of {self._names[index]}"

    def _record(self, code: int) -> None:
        """Record the start of a collective."""
        _LAST_ISSUER[:] = [self._reference]
        self._collectives.append(code)
        self._digest = (self._digest * _MULTIPLIER + code + 1) % (1 << DIGEST_BITS)

    def _is_gathered(self, index: int) -> bool:
        group = self._groups[index]
        return group.is_unsharded or group._all_gather_result is not None

    def _ordered_gather(self, index: int, unshard: Callable[[bool], None]) -> Callable[..., None]:
        """Return the replacement of a unit's `unshard`."""
        group = self._groups[index]
        replicas = getattr(group.mesh_info, "replicate_mesh_size", 1)
        # Units are gathered over the shard dimension only. One rank needs no collective.
        ranks = math.prod(group.mesh_info.mesh.shape) // replicas

        def gather(async_op: bool = False) -> None:
            in_backward = group._training_state is TrainingState.PRE_BACKWARD
            if in_backward and self._is_fixed and self._runs_backward and index >= self._unreduced:
                # A prefetch of a unit that is reduced already, see Note [Order of units].
                return
            is_skipped = in_backward and not group.unshard_in_backward
            if not self._is_gathered(index) and not is_skipped:
                if self._is_fixed:
                    self._gather_units(range(index))
                if ranks > 1:
                    self._record(2 * index)
            unshard(async_op)

        return gather

    def _gather_units(self, indices: range) -> None:
        """Gather the units of `indices` that are not gathered yet. Collective."""
        for index in indices:
            # torch does not initialize the unit of a module that was replaced before the first
            # forward: its `_is_root` stays None.
            if self._is_gathered(index) or self._states[index]._is_root is None:
                continue
            group = self._groups[index]
            with group.use_training_state(TrainingState.FORWARD):
                group.unshard()
                group.wait_for_unshard()

    def _gather_remaining(self, *_: object) -> None:
        self._gather_units(range(len(self._groups)))

    def _ordered_reduction(self, index: int) -> Callable[..., None]:
        """Return the replacement of a unit's `post_backward`."""
        group = self._groups[index]

        def reduce(*_: object) -> None:
            self._calls[index] -= 1
            is_deferred = self._is_fixed and group.reduce_grads and index < self._unreduced
            if not is_deferred:
                self._reduce(index)
            elif self._calls[index] <= 0:
                self._awaits_reduction[index] = True
                self._reduce_ready()

        return reduce

    def _counted_registration(self, index: int, register: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of a unit's `_register_post_backward_hook`, which counts calls."""

        def register_and_count(args: Any, kwargs: Any) -> Any:
            registered = register(args, kwargs)
            # torch returns its arguments unchanged where no input requires a gradient.
            if registered[0] is not args or registered[1] is not kwargs:
                self._calls[index] += 1
            return registered

        return register_and_count

    def _reduce(self, index: int) -> None:
        group = self._groups[index]
        # torch issues no collective for a unit that is frozen or was never gathered.
        trains = any(
            p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")
            for p in group.fsdp_params
        )
        if group.reduce_grads and trains:
            self._record(2 * index + 1)
        self._reductions[index]()

    def _begin_backward(self) -> None:
        self._unreduced = len(self._groups)
        self._awaits_reduction = [False] * len(self._groups)
        self._gather_units(range(len(self._groups)))
        self._runs_backward = True

    def _reduce_ready(self) -> None:
        """Reduce units from the end of the order, up to the first one that awaits its backward."""
        while self._unreduced > 0:
            index = self._unreduced - 1
            is_prepared = self._states[index]._is_root is not None
            if is_prepared and not self._awaits_reduction[index]:
                return
            self._unreduced = index
            if is_prepared:
                self._reduce(index)

    def _reduce_remaining(self) -> None:
        """Reduce the units whose backward did not run, or ran for only some of their calls."""
        self._calls = [0] * len(self._groups)
        for index in reversed(range(len(self._groups))):
            if index < self._unreduced and self._states[index]._is_root is not None:
                # This is not `_reduce`, because later patches wrap `post_backward` to complete the
                # gradients of the unit.
                self._groups[index].post_backward()
        self._calls = [0] * len(self._groups)
        self._unreduced = len(self._groups)
        self._runs_backward = False
