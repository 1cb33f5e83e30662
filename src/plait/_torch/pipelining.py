"""Tables of actions that torch's pipeline schedules generate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def schedule_actions(
    name: str, *, pp: int, stages_per_rank: int, microbatches: int, only: int | None = None
) -> list[list[tuple[int, str, int]]]:
    """Return the actions that a pipeline schedule of torch performs on every pipeline rank.

    Only the generator of the schedule runs, with placeholders for the stages. It needs no process
    group and no module, and sends and receives are not added. A forward that overlaps with a
    backward is returned as the two actions in torch's order. Idle slots are left out.

    Args:
        name: Class in `torch.distributed.pipelining.schedules`.
        pp: Number of pipeline ranks.
        stages_per_rank: Number of stages per pipeline rank.
        microbatches: Number of micro-batches.
        only: Rank whose actions are needed, or None for all. If torch generates the actions of each
            rank separately, the lists of the other ranks are empty.

    Returns:
        One list per rank of (stage, computation, micro-batch). The computation is "F" for a
        forward, and "B" for a backward. In a split backward, "I" stands for the
        gradients of the inputs, and "W" for those of the weights.
    """
    # Imported here, because the import takes long and few processes need it.
    from torch.distributed.pipelining import schedules

    def keep_order(self: Any, actions: Any, format: str = "compute_only") -> None:
        """Replace the end of torch's constructor, which adds sends and receives."""
        self.pipeline_order = actions

    base = getattr(schedules, name)
    overrides: dict[str, Any] = {"_prepare_schedule_with_comms": keep_order}

    if only is not None and hasattr(base, "_calculate_single_rank_operations"):

        def calculate_rank(self: Any, rank: int) -> list[Any]:
            return base._calculate_single_rank_operations(self, rank) if rank == only else []

        def add_no_bubbles(self: Any, _stages: int) -> Any:
            # The original inserts idle slots, for which it needs the actions of all ranks.
            return self.pipeline_order

        overrides["_calculate_single_rank_operations"] = calculate_rank
        overrides["_add_bubbles_to_actions"] = add_no_bubbles

    stage = SimpleNamespace(
        num_stages=pp * stages_per_rank, group_size=pp, group_rank=0, submod=None
    )
    generator = type(name, (base,), overrides)
    table = generator([stage] * stages_per_rank, microbatches).pipeline_order
    return [_computations(table[rank]) for rank in range(pp)]


def _computations(actions: list[Any]) -> list[tuple[int, str, int]]:
    """Return the actions of one rank as tuples, with overlapped actions split into two."""
    computations = []
    for action in actions:
        if action is None:
            # An idle slot.
            continue
        for part in action.sub_actions or (action,):
            kind = str(part.computation_type.value)
            computations.append((int(part.stage_index), kind, int(part.microbatch_index)))
    return computations
