"""Times of single kernels and of one planned rank, compared with the planner.

Constants of the planner that follow from kernel times are written to a calibration file, which
`plait plan --calibrate FILE` reads. All other constants keep the values of the package. `plait
calibrate` also measures training steps, and takes longer.

`rank_of_plan` runs one rank of a layout that was planned for eight devices.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from plait.config.resolving.resolve import load, resolve
from plait.engine.single_rank import run_single_rank
from plait.planner.calibrate import (
    RATE_WIDTH,
    Calibration,
    CalibrationOrigin,
    DeviceRates,
    priors_from_rates,
    save_calibration,
    uncalibrated,
)
from plait.planner.constants import Priors, fitted_priors
from plait.planner.hardware import DEVICE_FAMILIES, Cluster, DeviceSpec
from plait.planner.hardware import cluster as cluster_of
from plait.planner.models import Model, from_config
from plait.planner.output import config_of
from plait.planner.request import Request
from plait.planner.search import plan, price
from plait.sizes import GIB, MIB
from plait.validation.ceilings import PRODUCT_SIZE, bfloat16_peak, datasheet, seconds_of
from plait.validation.context import (
    MEDIUM,
    TINY,
    WIDE,
    Context,
    Workload,
    largest_size,
    on_meta,
    require,
    timed,
)
from plait.validation.rows import NotRun, Verdict, verdict
from plait.validation.throughput import STEP_SECONDS

LENGTHS = (1024, 4096, 8192, 32768)
"""Sequence lengths of the attention kernels. The tokens of a call are 8,192 or one sequence."""
TOKENS = 8192
_SMALL_LENGTHS = (16, 32)
_RAMP_KERNELS = 200


def calibrate(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Measure kernels, write a calibration file, and compare predicted and measured step times."""
    figures = datasheet(context)
    bfloat16_peak(figures)
    workload = context.size(WIDE, small=TINY)
    kernels = {
        "products": products(context, workload),
        "attention": attention(context, workload),
        "norms": norms(context, workload),
        "loss": loss(context, workload),
        "optimizer": optimizer(context),
        "addition_bytes_per_second": addition(context),
        "small_kernel_seconds": small_kernel(context),
    }
    context.progress(kernels)
    calibration = calibration_of(kernels, figures)
    numbers = {
        **kernels,
        "constants": constants_of(calibration),
        **planned_step(context, figures, calibration),
    }
    # Times of a simulated device would be wrong constants, but what writes them runs.
    if context.calibration is not None and not context.is_small:
        facts = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "kernels": kernels}
        save_calibration(
            context.calibration, calibration, CalibrationOrigin(str(figures.name), "", facts)
        )
        numbers["file"] = context.calibration.name
    return timed(context, verdict([], **numbers))


def products(context: Context, workload: Workload) -> dict[str, float]:
    """Return the FLOP/s of bfloat16 matrix multiplications of a layer and the head, by shape."""
    rows = context.size(TOKENS, small=64)
    width = (workload.heads + 2 * workload.kv_heads) * workload.head_dim
    shapes = [
        (rows, workload.hidden, width),
        (rows, workload.hidden, workload.hidden),
        (rows, workload.hidden, 2 * workload.ffn),
        (rows, workload.ffn, workload.hidden),
        (rows, workload.hidden, workload.vocabulary),
    ]
    if not context.is_small:
        shapes.append((PRODUCT_SIZE, PRODUCT_SIZE, PRODUCT_SIZE))
    rates = {}
    for rows, inner, columns in shapes:
        left = torch.randn(rows, inner, dtype=torch.bfloat16, device=context.device)
        right = torch.randn(inner, columns, dtype=torch.bfloat16, device=context.device)
        seconds = seconds_of(context, lambda left=left, right=right: torch.mm(left, right))  # type: ignore[misc]
        rates[f"{rows} x {inner} x {columns}"] = 2.0 * rows * inner * columns / seconds
    return rates


def attention(context: Context, workload: Workload) -> dict[str, dict[str, float]]:
    """Return seconds and FLOP/s of causal attention, without and with backward, by length."""
    by_length = {}
    for length in context.size(LENGTHS, small=_SMALL_LENGTHS):
        batch = max(1, context.size(TOKENS, small=32) // length)
        shape = (batch, workload.heads, length, workload.head_dim)
        kv_shape = (batch, workload.kv_heads, length, workload.head_dim)
        query = _random_parameter(context, *shape)
        key = _random_parameter(context, *kv_shape)
        value = _random_parameter(context, *kv_shape)
        forward = partial(
            F.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True
        )
        gradient = torch.randn_like(forward())
        # The backward cannot run without its forward, so both are timed.
        both = partial(_forward_and_backward, forward, (query, key, value), gradient)

        # Short sequences take less time per call and need more calls for the same accuracy.
        calls = max(2, 8192 // length)
        forward_seconds = seconds_of(context, forward, calls=calls)
        both_seconds = seconds_of(context, both, calls=calls)
        # Causal attention computes half of the square: scores and outputs, 2 FLOPs each.
        flops = 2.0 * batch * length**2 * workload.heads * workload.head_dim
        by_length[str(length)] = {
            "forward_seconds": forward_seconds,
            "forward_backward_seconds": both_seconds,
            "forward_flops_per_second": flops / forward_seconds,
            # The backward computes five products of the forward's two.
            "flops_per_second": 3.5 * flops / both_seconds,
        }
    return by_length


def _random_parameter(context: Context, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=context.device, requires_grad=True)


def _forward_and_backward(
    forward: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], gradient: torch.Tensor
) -> None:
    # Unlike `backward`, this does not add to earlier gradients, which would also be measured.
    torch.autograd.grad(forward(), inputs, gradient)


def norms(context: Context, workload: Workload) -> dict[str, float]:
    """Return seconds of RMSNorm with its backward, for torch's fused and Transformers' version."""
    rows = context.size(TOKENS, small=64)
    x = _random_parameter(context, rows, workload.hidden)
    weight = torch.ones(
        workload.hidden, dtype=torch.bfloat16, device=context.device, requires_grad=True
    )
    gradient = torch.randn_like(x)

    def fused() -> None:
        torch.autograd.grad(F.rms_norm(x, (workload.hidden,), weight, 1e-5), (x, weight), gradient)

    def in_parts() -> None:
        # The statements of LlamaRMSNorm: statistics in float32, the weight in the dtype of the
        # input.
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        torch.autograd.grad(weight * scaled.to(x.dtype), (x, weight), gradient)

    return {
        "fused_seconds": seconds_of(context, fused),
        "in_parts_seconds": seconds_of(context, in_parts),
    }


def loss(context: Context, workload: Workload) -> dict[str, float]:
    """Return seconds of cross entropy in float32 for bfloat16 logits, with its backward."""
    rows = context.size(TOKENS, small=64)
    vocabulary = workload.vocabulary
    logits = _random_parameter(context, rows, vocabulary)
    targets = torch.randint(0, vocabulary, (rows,), device=context.device)

    def cross_entropy() -> None:
        torch.autograd.grad(F.cross_entropy(logits.float(), targets), logits)

    return {"seconds": seconds_of(context, cross_entropy, calls=3)}


def optimizer(context: Context) -> dict[str, float]:
    """Return seconds and bytes per second of the fused AdamW (28 bytes per parameter)."""
    count = context.size(2**28, small=2**16)
    parameter = torch.zeros(count, device=context.device, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    adamw = torch.optim.AdamW([parameter], fused=True)
    seconds = seconds_of(context, adamw.step, calls=3)
    # Reads weight, gradient and two moments; writes weight and moments; float32.
    return {"seconds": seconds, "parameters": count, "bytes_per_second": 28.0 * count / seconds}


def addition(context: Context) -> float:
    """Return bytes per second, read plus written, of an addition of two float32 tensors."""
    nbytes = context.size(GIB, small=MIB)
    left = torch.ones(nbytes // 4, device=context.device)
    right = torch.ones_like(left)
    result = torch.empty_like(left)
    # Two tensors are read and one is written.
    return 3.0 * nbytes / seconds_of(context, lambda: torch.add(left, right, out=result))


def small_kernel(context: Context) -> float:
    """Return the seconds per kernel of a long series of nearly empty kernels.

    The result is the launch time on the host or the run time on the device, whichever is longer.
    """
    x = torch.zeros(1, device=context.device)

    def kernels() -> None:
        for _ in range(_RAMP_KERNELS):
            x.add_(1.0)

    return seconds_of(context, kernels, calls=1) / _RAMP_KERNELS


def calibration_of(kernels: Mapping[str, Any], figures: DeviceSpec) -> Calibration:
    """Return the constants of the package, with measured values where kernels determine them."""
    rates = DeviceRates(kernels["products"], kernels["addition_bytes_per_second"])
    priors = priors_from_rates(fitted_priors(), figures, rates, processes=1, precision="bf16")
    # The peak at the clock under load, as in the formulas of the planner.
    peak = bfloat16_peak(figures) * float(figures.power)
    family = DEVICE_FAMILIES[int(figures.family)]
    shares = [entry["flops_per_second"] / peak for entry in kernels["attention"].values()]
    priors = with_value(priors, f"attention.{family}", median(shares))
    return uncalibrated(with_value(priors, "ramp", kernels["small_kernel_seconds"]))


def with_value(priors: Priors, name: str, value: float) -> Priors:
    """Return `priors` with a measured value, clamped to the physical range of the constant."""
    constant = priors.constants[name]
    inside = min(max(value, constant.least), constant.most)
    measured = replace(constant, median=inside, width=max(RATE_WIDTH, 0.4 * constant.width))
    return replace(priors, constants={**priors.constants, name: measured})


def constants_of(calibration: Calibration) -> dict[str, float]:
    """Return the constants of a calibration that differ from those of the package."""
    shipped = fitted_priors().rates.values
    values = calibration.time.rates.values
    return {name: float(value) for name, value in values.items() if value != shipped[name]}


def planned_step(context: Context, figures: DeviceSpec, calibration: Calibration) -> dict[str, Any]:
    """Return the predicted and measured seconds of a step of the check `throughput`.

    The result is empty if this check has not run."""
    if STEP_SECONDS not in context.results:
        return {}
    workload, seconds = context.results[STEP_SECONDS]
    cluster = cluster_of(
        str(figures.name), 1, devices_per_node=1, memory_bytes=float(figures.memory_bytes)
    )
    batch = workload.samples * workload.accumulation
    request = request_of(workload, cluster, batch=batch, precision="bf16")
    layout = {
        "stage": 3,
        "micro_batch": workload.samples,
        "accumulation": workload.accumulation,
    }
    shipped = price(request, [layout])[0]
    fitted = price(request, [layout], calibration=calibration)[0]
    return {
        "step": {
            "measured_seconds": seconds,
            "planned_seconds": shipped.seconds,
            "planned_seconds_calibrated": fitted.seconds,
            "interval": [shipped.seconds_low, shipped.seconds_high],
            "terms": dict(shipped.terms),
        }
    }


def request_of(workload: Workload, cluster: Cluster, *, batch: int, precision: str) -> Request:
    """Return a plan request for a workload, with `batch` samples per step."""
    architecture = from_config(workload.fields, source="the model of this check")
    model = Model(architecture, {"config": workload.fields})
    return Request(model, cluster, batch, workload.length, precision)


FACTOR = 1.5
"""Largest allowed ratio of measured to predicted time, or of predicted to measured time."""
DEVICES = 8
GLOBAL_BATCH = 32
COMPUTED_TERMS = (
    "products",
    "attention",
    "elementwise",
    "recompute",
    "head",
    "host",
    "accumulate",
    "optimizer",
    "fixed",
)
"""Terms of a step that do not depend on other ranks. A single rank neither waits nor sends."""
SIZES = ((MEDIUM, 20 * GIB), (TINY, 1 * GIB))


def rank_of_plan(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Run the first rank of the best layout with the degrees in `settings["fixed"]`."""
    require("transformers")
    figures = datasheet(context)
    workload = largest_size(context, SIZES)
    memory = 80 * GIB if context.is_small else context.free_bytes()
    cluster = cluster_of(str(figures.name), DEVICES, devices_per_node=DEVICES, memory_bytes=memory)
    precision = "bf16" if "bf16" in figures.flops else "fp16"
    request = request_of(workload, cluster, batch=GLOBAL_BATCH, precision=precision)
    planned = plan(request, fixed=settings["fixed"], best=1)
    if not planned.best:
        raise NotRun(
            f"no layout with {settings['fixed']} fits into {memory / GIB:.1f} GiB; use a"
            " larger device"
        )

    choice = planned.best[0]
    tree = config_of(request, choice, {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}})
    # The model is given as a module, and its data are random.
    for section in ("model", "data"):
        del tree[section]
    resolved = resolve(load(tree), world_size=DEVICES)
    # The first run loads kernels.
    for _ in range(2):
        run = run_single_rank(
            on_meta(workload),
            resolved,
            rank=0,
            samples=resolved.batch.micro_batch_size,
            length=workload.length,
            real=True,
        )
        gc.collect()
    terms = dict(choice.terms)
    # A term that the layout does not have is missing.
    prediction = sum(terms[name] for name in COMPUTED_TERMS if name in terms)
    result = judge(
        run.step_seconds,
        prediction,
        layout={name: float(value) for name, value in choice.layout.items()},
        terms=terms,
        workload=workload.as_dict(),
        peak=run.peak,
        peak_planned=choice.allocated,
    )
    return timed(context, result)


def judge(measured: float, prediction: float, **numbers: Any) -> Verdict:
    """Return a failed verdict if measured and planned seconds differ by a factor above FACTOR."""
    ratio = measured / prediction if prediction else float("inf")
    problem = (
        f"measured {measured:.4g} s, planned {prediction:.4g} s: {ratio:.2f} times, allowed"
        f" {1 / FACTOR:.2f} to {FACTOR}"
    )
    problems = [] if 1 / FACTOR <= ratio <= FACTOR else [problem]
    return verdict(
        problems,
        seconds=measured,
        planned_seconds=prediction,
        ratio=ratio,
        allowed=FACTOR,
        **numbers,
    )
