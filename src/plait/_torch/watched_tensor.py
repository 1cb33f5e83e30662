"""Tensor that records writes to it, for gradients that stand in for others."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

Write = Literal["zeros", "values"]

_ZEROING = ("aten::zero_", "aten::_foreach_zero_")
_NO_WRITE = "aten::detach_"


class WatchedTensor(torch.Tensor):
    """Tensor that records writes to it and to its views.

    The version counter of a DTensor is not enough: `torch._foreach_zero_`, which optimizers call,
    does not increment it. Comparing values would wait for the device.

    Attributes:
        writes: Kinds of the writes so far. All views of one tensor share the list.
    """

    writes: list[Write]

    # Operators on a DTensor reach its local tensor in `__torch_dispatch__` only.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def watch(tensor: torch.Tensor, writes: list[Write]) -> WatchedTensor:
        """Return a tensor with the same storage that appends writes to `writes`."""
        watched = torch.Tensor._make_subclass(WatchedTensor, tensor)
        watched.writes = writes
        return watched

    def _plain(self) -> torch.Tensor:
        with no_dispatch():
            return torch.Tensor._make_subclass(torch.Tensor, self)

    # torch refuses these conversions for a subclass.
    def __repr__(self, **settings: Any) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._plain().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self._plain().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self._plain().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with no_dispatch():
            result = operator(*args, **kwargs)

        schema = operator._schema
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is None:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            watched = [leaf for leaf in tree_leaves(value) if isinstance(leaf, WatchedTensor)]
            if not argument.alias_info.is_write:
                # The result is a view.
                if watched and isinstance(result, torch.Tensor):
                    result = cls.watch(result, watched[0].writes)
            elif schema.name != _NO_WRITE:
                write: Write = "zeros" if schema.name in _ZEROING else "values"
                for tensor in watched:
                    tensor.writes.append(write)
        return result
