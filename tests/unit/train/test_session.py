"""What a run's process hands to the engine. The whole of it runs in tests/integration/test_quickstart.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.config.resolving.resolve import load
from plait.engine.build import InitializeArguments
from plait.errors import ConfigError
from plait.train import session
from plait.train.loop import Position


class Handed(Exception):
    """Instead of an engine."""


@pytest.mark.parametrize("done", [0, 30])
def test_a_resumed_run_has_the_schedule_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    def begin(_: Any, given: InitializeArguments) -> None:
        raise Handed(given.total_steps)

    copies = SimpleNamespace(model_copy=lambda update: None)
    checked: Any = SimpleNamespace(
        resolved=SimpleNamespace(data_parallel=copies, model_copy=copies.model_copy),
        section=SimpleNamespace(steps=100),
        folder=SimpleNamespace(links=None),
        checked=SimpleNamespace(with_resolved=lambda resolved: None),
        built=SimpleNamespace(weights=None),
        position=Position(done, 4 * done),
    )
    monkeypatch.setattr(session, "build_engine", begin)
    with pytest.raises(Handed, match="^100$"):
        session.run(checked, stop=None, listeners=())  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [{}, {"sequence_length": 64}])
def test_a_run_says_where_its_text_comes_from(data: dict[str, Any], tmp_path: Path) -> None:
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
