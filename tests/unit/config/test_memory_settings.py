"""Recompute and offload in a file: what follows from what, and what contradicts itself."""

import pytest

from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import BATCH, resolved, rows, written

FULL = {"recompute": {"mode": "full"}}


def test_a_budget_is_a_mode():
    recompute = {"recompute": {"budget_gib": 1.5}}
    made = resolved({"parallel": recompute, "data": {"sequence_length": 64}})
    assert (made.recompute.mode, made.recompute.budget_bytes) == ("budget", 3 * 2**29)
    assert made.recompute.sequence_length == 64
    source = "derived: parallel.recompute.budget_gib is given"
    assert made.sources["parallel.recompute.mode"] == source
    assert made.sources["parallel.recompute.sequence_length"] == "derived: data.sequence_length"


def test_cpu_checkpointing_is_offload_of_inputs():
    made = resolved({"activation_checkpointing": {"cpu_checkpointing": True}, "parallel": FULL})
    assert (made.activation_offload.fraction, made.activation_offload.device) == (1.0, "cpu")
    source = "file: activation_checkpointing.cpu_checkpointing"
    assert made.sources["parallel.activation_offload.fraction"] == source


CONTRADICTIONS = """
    parallel.recompute.mode=budget -> no budget is given
    parallel.recompute.mode=full parallel.recompute.budget_gib=1 -> the mode is full
    parallel.recompute.budget_gib=1 -> neither it nor data.sequence_length is given
    activation_checkpointing.cpu_checkpointing=true parallel.recompute.mode=full parallel.activation_offload.fraction=0.5 -> the file sets 0.5 on cpu
    parallel.activation_offload.fraction=0.5 parallel.activation_offload.device=disk -> no folder is given
    parallel.activation_offload.fraction=1.5 -> 1.5
    OPT.device=cpu -> stage 0 keeps full optimizer states
    zero_optimization.stage=2 OPT.device=nvme -> no folder is given
    OPT.device=nvme OPT.nvme_path=a -> stage 0 keeps full optimizer states
    zero_optimization.stage=2 OPT.device=nvme OPT.nvme_path=a OPT.buffer_count=3 -> buffer_count
    zero_optimization.stage=3 PARAM.device=nvme -> no folder is given
    zero_optimization.stage=3 PARAM.device=nvme PARAM.nvme_path=a PARAM.buffer_count=1 -> buffer_count
    zero_optimization.stage=2 PARAM.device=nvme PARAM.nvme_path=a -> stage 2 keeps parameters unsharded
    zero_optimization.stage=3 PARAM.device=cpu -> and those are on the device
    zero_optimization.stage=3 PARAM.device=cpu OPT.device=nvme OPT.nvme_path=a -> and those are on disk
    zero_optimization.stage=3 PARAM.device=nvme PARAM.nvme_path=a OPT.device=cpu -> takes them into host memory
    zero_optimization.stage=2 OPT.device=cpu OPT.ratio=0 -> offload_optimizer.ratio
    zero_optimization.stage=3 PARAM.device=cpu OPT.device=cpu OPT.ratio=0.5 -> offload_optimizer.ratio leaves part of them on the device
    zero_optimization.stage=2 PARAM.device=cpu OPT.device=cpu -> stage 2 keeps parameters unsharded
    pipeline.activation_checkpoint_interval=2 -> not in groups
    optimizer.type=SGD optimizer.states=int8 -> implemented for Adam and AdamW, but the type is SGD
    optimizer.states=int4 -> int4
    optimizer.states=float8 optimizer.params.amsgrad=true -> `amsgrad` is a parameter of torch's kernels
    optimizer.states=int8 zero_optimization.stage=2 OPT.device=cpu -> device is cpu
    optimizer.states=bf16 zero_optimization.stage=2 parallel.optimizer_in_backward=true -> optimizer_in_backward is true
"""


def check_contradiction(row):
    text = row[0].replace("OPT", "zero_optimization.offload_optimizer")
    text = text.replace("PARAM", "zero_optimization.offload_param")
    with pytest.raises(ConfigError, match=row[1]):
        resolved(written(text))


def test_contradictions():
    check_rows(rows(CONTRADICTIONS), check_contradiction)


def test_a_budget_needs_a_batch_size():
    from plait.config.resolving.resolve import load, resolve

    config = load({"parallel": {"recompute": {"budget_gib": 1, "sequence_length": 8}}})
    with pytest.raises(ConfigError, match="the file gives no batch size"):
        resolve(config, world_size=1, micro_batch_size=1)


IN_FILES = {"device": "nvme", "nvme_path": "a", "buffer_size": 9}
ON_HOST = {"device": "cpu"}


@pytest.mark.parametrize(
    ("zero", "device", "with_states", "said"),
    [
        ({"stage": 3}, "none", False, "none"),
        ({"stage": 3, "offload_optimizer": IN_FILES}, "none", False, "none"),
        ({"stage": 1, "offload_optimizer": IN_FILES}, "nvme", True, "nvme, with the states"),
        ({"stage": 2, "offload_optimizer": IN_FILES}, "nvme", True, "nvme, with the states"),
        ({"stage": 3, "offload_param": IN_FILES}, "nvme", False, "nvme"),
        ({"stage": 3, "offload_param": IN_FILES, "offload_optimizer": IN_FILES}, "nvme", False, "nvme"),
        ({"stage": 2, "offload_optimizer": ON_HOST}, "cpu", True, "cpu, with the states"),
        ({"stage": 3, "offload_optimizer": ON_HOST}, "cpu", True, "cpu, with the states"),
        ({"stage": 3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST}, "cpu", False, "cpu"),
    ],
)  # fmt: skip
def test_where_shards_are(zero, device, with_states, said):
    """The table of docs/reference/offload.md, and what `plait config explain` says of it."""
    from plait.config.resolving.explain import explain

    offload = resolved({"zero_optimization": zero}).parameter_offload
    assert (offload.device, offload.with_states) == (device, with_states)
    if device == "nvme" and not with_states:
        assert (offload.path, offload.pool_bytes) == ("a", 5 * 9 * 4)
    values = explain({**BATCH, "zero_optimization": zero}, world_size=4).values
    values = {value.name: value.value for value in values}
    assert values["zero_optimization.offload_param.device"] == said


def test_published_keys_without_a_meaning_are_noted():
    from plait.config.resolving.explain import explain

    section = {**IN_FILES, "max_in_cpu": 1e9, "pin_memory": True}
    zero = {"stage": 3, "offload_param": section}
    keys = explain({**BATCH, "zero_optimization": zero}, world_size=4).keys
    rows = {row.path: row for row in keys}
    for name, meaning in (
        ("max_in_cpu", "all shards are in files"),
        ("pin_memory", "need no pinned memory"),
    ):
        row = rows[f"zero_optimization.offload_param.{name}"]
        assert row.status == "ignored" and meaning in row.meaning
