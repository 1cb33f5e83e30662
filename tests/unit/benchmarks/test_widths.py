from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner_accuracy.frameworks import framework, knowledge, without_name
from benchmarks.planner_accuracy.learn import rows_of
from benchmarks.planner_accuracy.widths import Residuals, residuals, scale_of, scaled


def test_the_scale_covers_nine_in_ten():
    drawn = np.random.default_rng(0).normal(0, 0.2, 4000)
    found = scale_of([Residuals(np.abs(drawn), np.full(4000, 0.1), np.zeros(4000))])
    assert found == pytest.approx(2.0, rel=0.05)


def test_widths_are_not_made_narrower():
    drawn = np.random.default_rng(0).normal(0, 0.1, 4000)
    found = scale_of([Residuals(np.abs(drawn), np.full(4000, 0.1), np.full(4000, 0.09))])
    assert found == 1.0


def test_a_family_of_many_rows_does_not_decide_alone():
    rng = np.random.default_rng(0)
    many, few = (Residuals(np.abs(rng.normal(0, width, n)), np.full(n, 0.1), np.zeros(n)) for width, n in ((0.1, 4000), (0.3, 40)))
    by_rows = scale_of([Residuals(np.concatenate([many.size, few.size]), np.full(4040, 0.1), np.zeros(4040))])
    assert scale_of([many, few]) > 1.1 * by_rows


def test_residuals_part_an_interval_into_constants_and_noise():
    rows = [row for row in rows_of("runs") if row["id"].startswith("SIMUMAX") and not row["moe"]]
    known = knowledge()
    found = residuals(rows, known)
    assert len(found.size) == 31 and (found.constants > 0).all()
    assert (found.noise >= known.time_spread - 1e-9).all()
    wider = residuals(rows, scaled(known, 2.0))
    assert wider.constants == pytest.approx(2 * found.constants, rel=0.01) and wider.noise == pytest.approx(found.noise, rel=1e-3)
    quiet = residuals(rows, replace(known, time_spread=0.0))
    assert quiet.constants == pytest.approx(found.constants, rel=0.01) and (quiet.noise < found.noise).all()


def test_a_framework_without_its_name_keeps_its_kernels():
    text = without_name("AA-Scaling (Aleph Alpha), attention kernel: flash_attention2 + RMS kernel")
    found = framework(text)
    assert found.name == "other" and "aleph" not in text.lower()
    assert (found.norms_apart, found.rotary_apart) == (0, 1)
    assert framework(without_name("x, attention kernel: flash_attentionv1.0.8")).flash == 0.65
    assert framework(without_name("InternEvo")) == framework("unknown")
    assert framework("unknown", newer=True).name == "other-modern"
