"""Recompute and offload in a file: what follows from a setting, and which settings contradict."""

import pytest

from plait.config.resolving.explain import explain
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from tests.unit.config.cases import BATCH, check_refusals, parse_tree, resolve_tree


def test_a_recompute_budget_sets_the_mode():
    tree = {"parallel": {"recompute": {"budget_gib": 1.5}}, "data": {"sequence_length": 64}}
    resolved = resolve_tree(tree)
    assert (resolved.recompute.mode, resolved.recompute.budget_bytes) == ("budget", 3 * 2**29)
    assert resolved.recompute.sequence_length == 64
    source = "derived: parallel.recompute.budget_gib is given"
    assert resolved.sources["parallel.recompute.mode"] == source
    assert resolved.sources["parallel.recompute.sequence_length"] == "derived: data.sequence_length"


def test_cpu_checkpointing_offloads_inputs_of_blocks():
    key = "activation_checkpointing.cpu_checkpointing"
    resolved = resolve_tree(parse_tree(f"{key}=true parallel.recompute.mode=full"))
    offload = resolved.activation_offload
    assert (offload.fraction, offload.device) == (1.0, "cpu")
    assert resolved.sources["parallel.activation_offload.fraction"] == f"file: {key}"


CONTRADICTIONS = """
    parallel.recompute.budget_gib=1 -> neither it nor data.sequence_length is given
    activation_checkpointing.cpu_checkpointing=true parallel.recompute.mode=full \
        parallel.activation_offload.fraction=0.5 -> the file sets 0.5 on cpu
    parallel.activation_offload.fraction=0.5 parallel.activation_offload.device=disk \
        -> no folder is given
    parallel.activation_offload.fraction=1.5 -> 1.5
    ZERO.stage=2 OPT.device=nvme -> no folder is given
    OPT.device=nvme OPT.nvme_path=a -> stage 0 keeps full optimizer states
    ZERO.stage=2 OPT.device=nvme OPT.nvme_path=a OPT.buffer_count=3 -> buffer_count
    ZERO.stage=3 PARAM.device=nvme -> no folder is given
    ZERO.stage=3 PARAM.device=nvme PARAM.nvme_path=a PARAM.buffer_count=1 -> buffer_count
    ZERO.stage=2 PARAM.device=nvme PARAM.nvme_path=a -> stage 2 keeps parameters unsharded
    ZERO.stage=3 PARAM.device=cpu -> and those are on the device
    ZERO.stage=3 PARAM.device=cpu OPT.device=nvme OPT.nvme_path=a -> and those are on disk
    ZERO.stage=2 OPT.device=cpu OPT.ratio=0 -> offload_optimizer.ratio
    ZERO.stage=3 PARAM.device=cpu OPT.device=cpu OPT.ratio=0.5 \
        -> offload_optimizer.ratio leaves part of them on the device
    ZERO.stage=2 PARAM.device=cpu OPT.device=cpu -> stage 2 keeps parameters unsharded
    pipeline.activation_checkpoint_interval=2 -> not in groups
    optimizer.states=int4 -> int4
    optimizer.states=float8 optimizer.params.amsgrad=true \
        -> `amsgrad` is a parameter of torch's kernels
    optimizer.states=int8 ZERO.stage=2 OPT.device=cpu -> device is cpu
    optimizer.states=bf16 ZERO.stage=2 parallel.optimizer_in_backward=true \
        -> optimizer_in_backward is true
"""


def test_contradictions_are_refused():
    check_refusals(CONTRADICTIONS, lambda text: resolve_tree(parse_tree(text)))


def test_a_budget_needs_a_batch_size():
    config = load({"parallel": {"recompute": {"budget_gib": 1, "sequence_length": 8}}})
    with pytest.raises(ConfigError, match="the file gives no batch size"):
        resolve(config, world_size=1, micro_batch_size=1)


ON_DISK = {"device": "nvme", "nvme_path": "a", "buffer_size": 9}
ON_HOST = {"device": "cpu"}


@pytest.mark.parametrize(
    ("stage", "optimizer", "parameters", "device", "explained"),
    [
        (3, {}, {}, "none", "none"),
        (3, ON_DISK, {}, "none", "none"),
        (1, ON_DISK, {}, "nvme", "nvme, with the states"),
        (3, {}, ON_DISK, "nvme", "nvme"),
        (3, ON_DISK, ON_DISK, "nvme", "nvme"),
        (2, ON_HOST, {}, "cpu", "cpu, with the states"),
        (3, ON_HOST, {}, "cpu", "cpu, with the states"),
        (3, ON_HOST, ON_HOST, "cpu", "cpu"),
    ],
)
def test_where_shards_are(stage, optimizer, parameters, device, explained):
    """The cases are those of the table in docs/reference/offload.md."""
    tree = {"stage": stage, "offload_optimizer": optimizer, "offload_param": parameters}
    offload = resolve_tree({"zero_optimization": tree}).parameter_offload
    assert (offload.device, offload.with_states) == (device, "with" in explained)
    if explained == "nvme":
        assert (offload.path, offload.pool_bytes) == ("a", 5 * 9 * 4)

    explanation = explain({**BATCH, "zero_optimization": tree}, world_size=4)
    values = {value.name: value.value for value in explanation.values}
    assert values["zero_optimization.offload_param.device"] == explained


def test_offload_keys_without_a_meaning_are_explained():
    section = {**ON_DISK, "max_in_cpu": 1e9, "pin_memory": True}
    zero = {"stage": 3, "offload_param": section}
    explanation = explain({**BATCH, "zero_optimization": zero}, world_size=4)
    rows = {row.path.rpartition(".")[2]: row for row in explanation.keys}
    assert rows["max_in_cpu"].status == rows["pin_memory"].status == "ignored"
    assert "all shards are in files" in rows["max_in_cpu"].meaning
    assert "need no pinned memory" in rows["pin_memory"].meaning
