"""Reports on two runs that differ in a known way."""

import json
import math
from dataclasses import replace

import pytest
import torch

from plait.config.resolving.resolve import load, resolve
from plait.verify.model_under_test import TestedModel
from plait.verify.parity import Difference, Trace, compare, worst
from plait.verify.plan import VerificationPlan
from plait.verify.report import Report, compare_configured, compare_float64, failure, lines

NAMES = ("embed", "layers.0.q", "layers.0.v", "layers.1.q", "head")
BF16 = {"bf16": {"enabled": True}}


def plan(*, exact=True, **config):
    resolved = resolve(
        load({"train_micro_batch_size_per_gpu": 1, "run": {}, **config}), world_size=1
    )
    return VerificationPlan(
        TestedModel(title="test", vocabulary=4, exact=exact),
        resolved,
        ("float64", "configured"),
        steps=2,
        dtype="float32",
        blocks=("layers.0", "layers.1"),
        lines=(),
    )


def different(section):
    return [(row.kind, row.step, row.name) for row in section.different]


def lines_with(text, table):
    return [line for line in table if text in line]


def trace(*, noise=0.0, seed=0):
    """Return two steps of a made-up training, with relative errors of size `noise`."""
    values = torch.Generator().manual_seed(1)
    errors = torch.Generator().manual_seed(seed)

    def draw(generator):
        return torch.randn(40, 5, generator=generator, dtype=torch.float64)

    def tensors(size):
        exact = {name: draw(values) * size for name in NAMES}
        return {name: tensor * (1 + noise * draw(errors)) for name, tensor in exact.items()}

    initial = dict.fromkeys(NAMES, torch.ones(40, 5, dtype=torch.float64))
    gradients = (tensors(1.0), tensors(1.0))
    updates = tensors(1e-3)
    return Trace(
        losses=(2.0 * (1 + noise / 10), 1.5),
        grad_norms=(1.0, 1.0 - noise / 10),
        gradients=gradients,
        parameters={name: initial[name] + updates[name] for name in NAMES},
        initial=initial,
        scales=(1.0, 1.0),
    )


def with_gradient(source, name, gradient, *, step):
    gradients = list(source.gradients)
    gradients[step] = {**gradients[step], name: gradient}
    return replace(source, gradients=tuple(gradients))


def scaled(source, name, factor, *, step=1):
    return with_gradient(source, name, source.gradients[step][name] * factor, step=step)


def test_equal_runs():
    section = compare_float64(plan(), trace(), trace(noise=1e-13))
    report = Report((section,), plan().blocks)
    assert not section.different and report.equal
    assert len(section.rows) == 2 + 2 + 10 + 5 + 5
    assert json.loads(json.dumps(report.as_dict()))["equal"] is True


def test_the_tolerance_follows_the_model_and_the_user():
    noisy = trace(noise=1e-9)
    assert compare_float64(plan(), trace(), noisy).different
    assert not compare_float64(plan(exact=False), trace(), noisy).different
    assert not compare_float64(plan(), trace(), noisy, tolerance=1e-7).different
    assert compare_float64(plan(exact=False), trace(), noisy, tolerance=1e-12).different


@pytest.mark.parametrize("factor", [0.5, -1.0, float("nan"), 1 + 1e-8])
def test_the_first_different_gradient_is_named(factor):
    actual = scaled(scaled(trace(), "head", 0.5), "layers.1.q", factor)
    section = compare_float64(plan(), trace(), actual)
    assert different(section) == [("gradient", 1, "layers.1.q"), ("gradient", 1, "head")]
    message = failure(Report((section,)))
    assert "2 of 24" in message
    assert "first: gradient of layers.1.q in step 1" in message


def test_a_missing_gradient_and_a_wrong_shape():
    missing = with_gradient(trace(), "layers.0.v", None, step=0)
    [row] = compare_float64(plan(), trace(), missing).different
    assert row.name == "layers.0.v"
    reshaped = replace(trace(), parameters={**trace().parameters, "head": torch.zeros(40, 4)})
    message = str(compare_float64(plan(), trace(), reshaped).different[0])
    assert message == "parameter of head: missing in one of the two runs, or of another shape"


def test_different_copies_on_ranks():
    name = "copies of parameter layers.0.q on different ranks"
    spread = (Difference(name, 0.25, "parameter", None, "layers.0.q"),)
    actual = replace(trace(), spread=spread)
    for section in (
        compare_float64(plan(), trace(), actual),
        compare_configured(plan(), trace(), trace(), actual),
    ):
        [row] = section.different
        assert str(row) == "parameter of layers.0.q: ranks hold different copies, 2.5e-01 apart"


def test_a_configured_run_may_err_as_one_process_does():
    mixed = plan(**BF16, communication_data_type="fp32")
    single = trace(noise=1e-2, seed=11)
    section = compare_configured(mixed, trace(), single, trace(noise=1e-2, seed=12))
    assert not section.different
    section = compare_configured(mixed, trace(), single, trace(noise=1.4e-2, seed=12))
    # All tensors of a step together are a large sample.
    expected = {("gradient", 0, ""), ("gradient", 1, ""), ("parameter", None, "")}
    assert set(different(section)) == expected


def test_a_configured_run_with_one_wrong_tensor():
    single = trace(noise=1e-2, seed=11)
    actual = scaled(trace(noise=1e-2, seed=12), "layers.0.v", 1.1, step=0)
    section = compare_configured(plan(**BF16), trace(), single, actual)
    assert ("gradient", 0, "layers.0.v") in different(section)

    # A parameter is compared by its update, which is 1e-3 here.
    exact = trace()
    frozen = replace(exact, parameters={**exact.parameters, "head": exact.initial["head"]})
    section = compare_configured(plan(**BF16), exact, single, frozen)
    assert ("parameter", None, "head") in different(section)


def test_skipped_steps_are_compared_by_their_overflow():
    exact = replace(trace(), gradients=({}, trace().gradients[1]), skipped=(0,))
    actual = replace(exact, grad_norms=(math.inf, 1.0))
    overflowed = replace(exact, grad_norms=(math.nan, 1.0))
    section = compare_configured(plan(), exact, overflowed, actual)
    assert not section.different
    assert "step 0" in section.notes[0]
    assert not [row for row in section.rows if row.step == 0 and row.kind != "loss"]
    for section in (
        compare_configured(plan(), exact, exact, actual),
        compare_float64(plan(), exact, actual),
    ):
        assert "one process does not overflow" in "".join(map(str, section.different))


def test_a_run_of_skipped_steps_proves_nothing():
    skipped = replace(trace(), gradients=({}, {}), grad_norms=(math.inf, math.inf), skipped=(0, 1))
    section = compare_configured(plan(), skipped, skipped, skipped)
    assert "no gradient was compared" in str(section.different[0])


def test_tables_show_the_worst_first():
    section = compare_float64(plan(), trace(), scaled(trace(), "layers.1.q", 0.5))
    report = Report((section,), plan().blocks)
    table = lines(report)
    # Title and headings come first.
    assert "DIFFERENT" in table[3]
    assert table[3].split()[:5] == ["gradient", "layers.1.*", "q,", "step", "1"]
    assert len(lines_with("layers.0", table)) == 2, "one line per block and kind"
    # Initial weights have one line, unless they differ.
    assert len(lines_with("initial weight", table)) == 1
    everything = lines(report, everything=True)
    assert len(lines_with("layers.0", everything)) == 6
    (line,) = lines_with("layers.1.q", lines_with("DIFFERENT", everything))
    assert line.split()[:2] == ["gradient", "layers.1.q"]


def test_json_has_no_infinity():
    missing = with_gradient(trace(), "head", None, step=0)
    report = Report((compare_float64(plan(), trace(), missing),), facts={"engine": "plait"})
    read = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert (read["equal"], read["first_different"], read["engine"]) == (False, "head", "plait")


def test_nan_is_the_largest_difference():
    difference = worst(compare(trace(), scaled(trace(), "head", float("nan"))))
    assert difference.tensor == "head"
    assert not difference.ok(math.inf)


def test_rounding_that_adam_makes_large_is_no_difference():
    """The gradient of a key's bias is 0 up to rounding, and Adam divides it by its size."""

    def full(bias, weight):
        unit = torch.ones(3, dtype=torch.float64)
        return {"bias": bias * unit, "weight": weight * unit}

    gradients = (full(1e-18, 1.0), full(1e-18, 1.0))
    expected = Trace((1.0, 1.0), (1.0, 1.0), gradients, full(1e-6, 1.0))
    actual = replace(expected, parameters=full(1e-6 + 5e-12, 1.0))
    assert worst(compare(expected, actual)).ok(1e-10)
    # A real gradient.
    gradients = (full(1e-9, 1.0), gradients[1])
    pair = (replace(expected, gradients=gradients), replace(actual, gradients=gradients))
    assert not worst(compare(*pair)).ok(1e-10)
