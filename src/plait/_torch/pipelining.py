"""The tables of torch's pipeline schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def schedule_actions(
    name: str, *, pp: int, stages_per_rank: int, microbatches: int, only: int | None = None
) -> list[list[tuple[int, str, int]]]:
    """What torch's pipeline schedule class `name` makes every pp rank do, in order: (stage, "F",
    "B", "I" or "W", micro-batch).

    Only the class's generator runs, on placeholders for the stages: no process group, no module,
    and not the lowering to sends and receives that its constructor ends with. A forward overlapped
    with a backward is given as the two, in torch's order. Idle slots are left out. With `only`, the
    other ranks' rows are empty where torch makes each for itself.
    """
    from torch.distributed.pipelining import schedules  # only here: it takes long to import

    def no_lowering(self: Any, actions: Any, format: str = "compute_only") -> None:
        self.pipeline_order = actions

    stage = SimpleNamespace(
        num_stages=pp * stages_per_rank, group_size=pp, group_rank=0, submod=None
    )
    base = getattr(schedules, name)
    changed: dict[str, Any] = {"_prepare_schedule_with_comms": no_lowering}
    each = "_calculate_single_rank_operations"
    gaps = "_add_bubbles_to_actions"
    if only is not None and hasattr(base, each):
        changed[each] = lambda self, rank: getattr(base, each)(self, rank) if rank == only else []
        # idle slots alone, for which it waits for the other ranks
        changed[gaps] = lambda self, stages: self.pipeline_order
    generator = type(name, (base,), changed)
    table = generator([stage] * stages_per_rank, microbatches).pipeline_order
    return [
        [
            (int(part.stage_index), str(part.computation_type.value), int(part.microbatch_index))
            for action in table[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        ]
        for rank in range(pp)
    ]
