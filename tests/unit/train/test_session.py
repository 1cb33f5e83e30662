"""What a run's process hands to the engine. The whole of it runs in tests/integration/test_quickstart.py."""

from types import SimpleNamespace

import pytest

from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from plait.train import session
from plait.train.loop import Position
from plait.train.session import run_warnings


class Handed(Exception):
    """Instead of an engine."""


@pytest.mark.parametrize("done", [0, 30])
def test_a_resumed_run_has_the_schedule_of_the_whole(monkeypatch, done):
    def begin(_, given):
        raise Handed(given.total_steps)

    copies = SimpleNamespace(model_copy=lambda update: None)
    checked = SimpleNamespace(
        resolved=SimpleNamespace(data_parallel=copies, model_copy=copies.model_copy),
        section=SimpleNamespace(steps=100),
        folder=SimpleNamespace(links=None),
        checked=SimpleNamespace(with_resolved=lambda resolved: None),
        built=SimpleNamespace(weights=None),
        position=Position(done, 4 * done),
    )
    monkeypatch.setattr(session, "build_engine", begin)
    with pytest.raises(Handed, match="^100$"):
        session.run(checked, stop=None, listeners=())


@pytest.mark.parametrize("data", [{}, {"sequence_length": 64}])
def test_a_run_says_where_its_text_comes_from(data, tmp_path):
    """A planned file has a sequence length alone, and must not train on the sources of Python."""
    config = load(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": data,
            "run": {"folder": str(tmp_path / "run")},
        }
    )
    with pytest.raises(ConfigError, match=r'data.source: .*set it to "files"'):
        session.check(config, world_size=1, cache=tmp_path, say=lambda text: None)


FILE = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "run": {"steps": 4},
}


@pytest.mark.parametrize(
    ("scheduler", "warned"),
    [
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 100}}, True),
        ({"type": "linear", "params": {"num_warmup_steps": 4}}, True),
        ({"type": "linear", "params": {"num_warmup_steps": 3}}, False),
        ({"type": "constant"}, False),
        (None, False),
    ],
)
def test_a_warm_up_longer_than_the_run(scheduler, warned):
    tree = FILE if scheduler is None else FILE | {"scheduler": scheduler}
    found = run_warnings(
        resolve(load(tree), world_size=1, total_steps=4), processes=1, cores=2, on_gpus=False
    )
    assert any("warms up" in line and "the run has 4" in line for line in found) == warned


@pytest.mark.parametrize(
    ("processes", "on_gpus", "warned"), [(64, False, True), (4, False, False), (64, True, False)]
)
def test_many_processes_on_few_cores(processes, on_gpus, warned):
    found = run_warnings(
        resolve(load(FILE), world_size=processes), processes=processes, cores=2, on_gpus=on_gpus
    )
    assert any("share 2 cores" in line for line in found) == warned
