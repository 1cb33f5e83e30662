"""Decisions of a run before its engine exists.

tests/integration/test_quickstart.py runs complete commands.
"""

from types import SimpleNamespace

import pytest

from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from plait.train import session
from plait.train.loop import Position
from plait.train.session import run_warnings


class EngineBuilt(Exception):
    """Raised in place of building an engine."""


@pytest.mark.parametrize("finished_steps", [0, 30])
def test_a_resumed_run_has_the_schedule_of_all_steps(monkeypatch, finished_steps):
    def build_engine(_, options):
        raise EngineBuilt(options.total_steps)

    resolved = SimpleNamespace(model_copy=lambda update: None)
    resolved.data_parallel = SimpleNamespace(model_copy=resolved.model_copy)
    checked_run = SimpleNamespace(
        resolved=resolved,
        section=SimpleNamespace(steps=100),
        folder=SimpleNamespace(links=None),
        checked=SimpleNamespace(with_resolved=lambda resolved: None),
        built=SimpleNamespace(weights=None),
        position=Position(finished_steps, 4 * finished_steps),
    )
    monkeypatch.setattr(session, "build_engine", build_engine)
    with pytest.raises(EngineBuilt, match="^100$"):
        session.run(checked_run, stop=None, listeners=())


@pytest.mark.parametrize("data", [{}, {"sequence_length": 64}])
def test_a_run_must_name_its_text(data, tmp_path):
    """A planned file has only a sequence length, and must not train on the sources of Python."""
    model = {"config": {"model_type": "llama"}}
    config = load({"model": model, "data": data, "run": {"folder": str(tmp_path / "run")}})
    with pytest.raises(ConfigError, match=r'data.source: .*set it to "files"'):
        session.check(config, world_size=1, cache=tmp_path, say=lambda text: None)


FILE = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "run": {"steps": 4},
}


@pytest.mark.parametrize(
    ("scheduler", "is_warned"),
    [
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 100}}, True),
        ({"type": "linear", "params": {"num_warmup_steps": 4}}, True),
        ({"type": "linear", "params": {"num_warmup_steps": 3}}, False),
        ({"type": "constant"}, False),
        (None, False),
    ],
)
def test_a_warm_up_longer_than_the_run(scheduler, is_warned):
    config = load(FILE | ({"scheduler": scheduler} if scheduler else {}))
    resolved = resolve(config, world_size=1, total_steps=4)
    warnings = run_warnings(resolved, processes=1, cores=2, on_gpus=False)
    assert any("warms up" in line and "the run has 4" in line for line in warnings) == is_warned


@pytest.mark.parametrize(
    ("processes", "on_gpus", "is_warned"),
    [(64, False, True), (4, False, False), (64, True, False)],
)
def test_many_processes_on_few_cores(processes, on_gpus, is_warned):
    resolved = resolve(load(FILE), world_size=processes)
    warnings = run_warnings(resolved, processes=processes, cores=2, on_gpus=on_gpus)
    assert any("share 2 cores" in line for line in warnings) == is_warned
