"""The report on two runs that differ in a known way."""

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


def plan(*, exact=True, **config):
    tree = {"train_micro_batch_size_per_gpu": 1, "run": {}, **config}
    resolved = resolve(load(tree), world_size=1)
    tested = TestedModel(title="test", vocabulary=4, exact=exact)
    passes, blocks = ("float64", "configured"), ("layers.0", "layers.1")
    fields = {"steps": 2, "dtype": "float32", "blocks": blocks, "lines": ()}
    return VerificationPlan(tested, resolved, passes, **fields)


def keys(section):
    return [(row.kind, row.step, row.name) for row in section.different]


def trace(*, noise=0.0, seed=0, scale=1.0):
    """Two steps of a made-up training with relative errors of size `noise`."""
    base, extra = torch.Generator().manual_seed(1), torch.Generator().manual_seed(seed)

    def draw(generator):
        return torch.randn(40, 5, generator=generator, dtype=torch.float64)

    def tensors(size):
        made = {name: draw(base) * size for name in NAMES}
        return {name: tensor * (1 + noise * draw(extra)) for name, tensor in made.items()}

    initial = {name: torch.ones(40, 5, dtype=torch.float64) for name in NAMES}
    gradients = (tensors(scale), tensors(scale))
    change = tensors(1e-3)
    return Trace(
        losses=(2.0 * (1 + noise / 10), 1.5),
        grad_norms=(1.0, 1.0 - noise / 10),
        gradients=gradients,
        parameters={name: initial[name] + change[name] for name in NAMES},
        initial=initial,
        scales=(1.0, 1.0),
    )


def test_equal():
    section = compare_float64(plan(), trace(), trace(noise=1e-13))
    assert not section.different
    report = Report((section,), plan().blocks)
    assert report.equal
    assert len(section.rows) == 2 + 2 + 10 + 5 + 5
    assert json.loads(json.dumps(report.as_dict()))["equal"] is True


def test_the_bar_follows_the_model_and_the_user():
    assert compare_float64(plan(), trace(), trace(noise=1e-9)).different
    assert not compare_float64(plan(exact=False), trace(), trace(noise=1e-9)).different
    assert not compare_float64(plan(), trace(), trace(noise=1e-9), tolerance=1e-7).different
    assert compare_float64(plan(exact=False), trace(), trace(noise=1e-9), tolerance=1e-12).different


def changed(source, name, factor, *, step=1):
    gradients = list(source.gradients)
    tensor = gradients[step][name]
    gradients[step] = {**gradients[step], name: tensor * factor}
    return replace(source, gradients=tuple(gradients))


@pytest.mark.parametrize("factor", [0.5, -1.0, float("nan"), 1 + 1e-8])
def test_one_gradient(factor):
    """The message names the first difference with its step."""
    broken = changed(changed(trace(), "head", 0.5), "layers.1.q", factor)
    section = compare_float64(plan(), trace(), broken)
    assert keys(section) == [("gradient", 1, "layers.1.q"), ("gradient", 1, "head")]
    message = failure(Report((section,)))
    assert "2 of 24" in message
    assert "first: gradient of layers.1.q in step 1" in message


def test_a_missing_gradient_and_a_wrong_shape():
    gradients = trace().gradients
    missing = replace(trace(), gradients=({**gradients[0], "layers.0.v": None}, gradients[1]))
    [row] = compare_float64(plan(), trace(), missing).different
    assert row.name == "layers.0.v"
    cut = replace(trace(), parameters={**trace().parameters, "head": torch.zeros(40, 4)})
    message = str(compare_float64(plan(), trace(), cut).different[0])
    assert message == "parameter of head: missing in one of the two runs, or of another shape"


def test_copies_on_ranks():
    tensor = "copies of parameter layers.0.q on different ranks"
    spread = (Difference(tensor, 0.25, "parameter", None, "layers.0.q"),)
    for section in (
        compare_float64(plan(), trace(), replace(trace(), spread=spread)),
        compare_configured(plan(), trace(), trace(), replace(trace(), spread=spread)),
    ):
        [row] = section.different
        assert str(row) == "parameter of layers.0.q: ranks hold different copies, 2.5e-01 apart"


def test_configured_allows_what_one_process_has():
    mixed = plan(bf16={"enabled": True}, communication_data_type="fp32")
    exact, single = trace(), trace(noise=1e-2, seed=11)
    assert not compare_configured(mixed, exact, single, trace(noise=1e-2, seed=12)).different
    worse = compare_configured(mixed, exact, single, trace(noise=1.4e-2, seed=12))
    # All tensors of a step together are a large sample.
    assert set(keys(worse)) == {("gradient", 0, ""), ("gradient", 1, ""), ("parameter", None, "")}


def test_configured_sees_one_wrong_tensor():
    single, found = trace(noise=1e-2, seed=11), trace(noise=1e-2, seed=12)
    broken = changed(found, "layers.0.v", 1.1, step=0)
    section = compare_configured(plan(bf16={"enabled": True}), trace(), single, broken)
    assert ("gradient", 0, "layers.0.v") in keys(section)


def test_configured_measures_parameters_against_what_changed():
    """After a step of 1e-3, a parameter that did not change is wrong by 1e-3."""
    still = replace(trace(), parameters={**trace().parameters, "head": trace().initial["head"]})
    single = trace(noise=1e-2, seed=11)
    section = compare_configured(plan(bf16={"enabled": True}), trace(), single, still)
    assert "head" in {row.name for row in section.different}


def test_skipped_steps():
    exact = replace(trace(), gradients=({}, trace().gradients[1]), skipped=(0,))
    found = replace(exact, grad_norms=(math.inf, 1.0))
    overflowed = replace(exact, grad_norms=(math.nan, 1.0))
    section = compare_configured(plan(), exact, overflowed, found)
    assert not section.different
    assert "step 0" in section.notes[0]
    assert not [row for row in section.rows if row.step == 0 and row.kind != "loss"]
    for needless in (
        compare_configured(plan(), exact, exact, found),
        compare_float64(plan(), exact, found),
    ):
        assert any("one process does not overflow" in str(row) for row in needless.different)


def test_nothing_but_skipped_steps_is_no_proof():
    nothing = replace(trace(), gradients=({}, {}), grad_norms=(math.inf, math.inf), skipped=(0, 1))
    section = compare_configured(plan(), nothing, nothing, nothing)
    assert "no gradient was compared" in str(section.different[0])


def test_tables():
    section = compare_float64(plan(), trace(), changed(trace(), "layers.1.q", 0.5))
    report = Report((section,), plan().blocks)
    table = lines(report)
    first = next(line for line in table if "DIFFERENT" in line)
    assert first == table[3], "the worst comes first, under title and headings"
    assert first.split()[:5] == ["gradient", "layers.1.*", "q,", "step", "1"]
    assert sum("layers.0" in line for line in table) == 2, "one line per block and kind"
    # Initial weights have one line, unless they differ.
    assert sum("initial weight" in line for line in table) == 1
    everything = lines(report, everything=True)
    assert sum("layers.0" in line for line in everything) == 6
    assert any(line.split()[:2] == ["gradient", "layers.1.q"] for line in everything)


def test_json_has_no_infinity():
    gradients = trace().gradients
    missing = replace(trace(), gradients=({**gradients[0], "head": None}, gradients[1]))
    report = Report((compare_float64(plan(), trace(), missing),), facts={"engine": "plait"})
    read = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert (read["equal"], read["first_different"], read["engine"]) == (False, "head", "plait")


def test_worst_is_nan():
    broken = changed(trace(), "head", float("nan"))
    assert worst(compare(trace(), broken)).tensor == "head"
    assert not worst(compare(trace(), broken)).ok(math.inf)


def test_noise_that_adam_makes_large():
    """The gradient of a key's bias is 0 up to rounding. Adam moves it nevertheless, which is no difference. A real gradient is one."""

    def full(bias, weight):
        values = {"bias": bias, "weight": weight}
        return {name: torch.full((3,), x, dtype=torch.float64) for name, x in values.items()}

    gradients = (full(1e-18, 1.0), full(1e-18, 1.0))
    one = Trace((1.0, 1.0), (1.0, 1.0), gradients, full(1e-6, 1.0))
    moved = replace(one, parameters=full(1e-6 + 5e-12, 1.0))
    assert worst(compare(one, moved)).ok(1e-10)
    loud = (full(1e-9, 1.0), gradients[1])
    pair = [replace(each, gradients=loud) for each in (one, moved)]
    assert not worst(compare(*pair)).ok(1e-10)
