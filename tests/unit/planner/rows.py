"""Published and measured runs for the tests of calibration and of the accuracy report."""

from functools import cache

from plait.planner.calibrate import Measured, facts_of, layout_facts
from plait.planner.hardware import cluster
from plait.planner.models import find_model
from plait.planner.request import Request
from plait.planner.search import plan, price

ROW = {
    "id": "X-1",
    "model_name": "thing",
    "n_layers": "32",
    "hidden": "4096",
    "n_heads": "32",
    "n_kv_heads": "8",
    "ffn_hidden": "14336",
    "vocab": "128256",
    "gated_mlp": "y",
    "tied_emb": "n",
    "gpu": "H100-80GB-SXM",
    "gpus_total": "16",
    "gpus_per_node": "8",
    "precision": "bf16",
    "seq_len": "4096",
    "global_batch": "64",
    "micro_batch": "1",
    "tp": "2",
    "sp": "y",
    "pp": "2",
    "vpp": "1",
    "cp": "1",
    "ep": "1",
    "dp": "4",
    "zero_or_fsdp": "ZeRO-1",
    "recompute": "none",
    "framework": "plait",
    "status": "ok",
    "step_time_s": "2.0",
}
"""Row of the tables of published runs."""


@cache
def planned(name):
    """Return the plan with the six best layouts without a pipeline on sixteen H100."""
    return plan(Request(find_model(name), cluster("h100", 16), 64, 2048), fixed={"pp": 1}, best=6)


def measured(name="llama-3-8b", *, factor=1.0, index=0):
    """Return a run of a planned layout.

    Args:
        name: Name of the model.
        factor: Ratio of the measured to the predicted time.
        index: Position of the layout in the plan.
    """
    planned_runs = planned(name)
    request = planned_runs.request
    choice = planned_runs.best[index]
    return Measured(
        gpu="h100",
        machine="",
        devices=16,
        devices_per_node=8,
        precision="bf16",
        compiled=False,
        sequence=2048,
        architecture=facts_of(request.model.architecture),
        layout=layout_facts(choice.layout),
        seconds=factor * price(request, [choice.layout])[0].seconds,
        bytes=choice.allocated,
        predicted_seconds=choice.seconds,
        predicted_bytes=choice.allocated,
    )
