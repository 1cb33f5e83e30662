"""The callback of the tutorial ends a run early, and the same command continues the run.

test_quickstart.py shows that every process calls the callbacks.
"""

import json
import re
from pathlib import Path

from tests.integration.commands import run_plait
from tests.integration.json_lines import rows_of_run
from tests.integration.tiny import llama

ROOT = Path(__file__).parents[2]
RECORD = """
from pathlib import Path

def record(event, engine):
    with Path("events").open("a") as file:
        print(type(event).__name__, getattr(event, "step", ""), file=file)
"""


def test_a_callback_ends_a_run_that_continues(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "tutorials" / "first-run.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = [text for text in blocks if "def stop_early" in text]
    # The loss of a tiny run does not fall to the value of the tutorial.
    module = block.replace("event.loss < 0.1", "event.step == 3") + RECORD
    (tmp_path / "tutorial_callbacks.py").write_text(module)
    (tmp_path / "text.txt").write_text("one and two make three. " * 600)
    data = {
        "source": "files",
        "paths": [str(tmp_path / "text.txt")],
        "sequence_length": 32,
        "vocab_size": 300,
    }
    callbacks = ["tutorial_callbacks:stop_early", "tutorial_callbacks:record"]
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "model": llama(),
        "data": data,
        "run": {"folder": "run", "steps": 12, "processes": 1, "callbacks": callbacks},
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    run_plait("train run.json")
    output = capsys.readouterr().out
    assert "ended by a callback" in output and "resume with" in output
    steps = [f"StepDone {step}" for step in range(1, 5)]
    expected = ["RunStarted ", *steps, "CheckpointSaved 4", "RunEnded 4"]
    assert (tmp_path / "events").read_text().splitlines() == expected

    run_plait("train run.json --set run.callbacks=[] --set run.steps=6")
    assert "finished" in capsys.readouterr().out
    steps = rows_of_run(tmp_path / "run", "step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
