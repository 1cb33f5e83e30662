"""Commands and code of the README, the tutorials and the how-to guides run as they are printed."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.commands import run_plait
from tools import reference

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    ROOT / "docs" / "how-to" / "choose-a-layout.md",
    ROOT / "docs" / "how-to" / "many-machines.md",
    ROOT / "docs" / "how-to" / "reduce-memory.md",
]


def blocks_of(page):
    """Return language and text of the code blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks_in(language):
    return [text for block_language, text in BLOCKS if block_language == language]


LINES = "".join(blocks_in("")).splitlines()
COMMANDS = sorted({line.split("  #")[0].strip() for line in LINES if line.startswith("plait ")})
ELSEWHERE = re.compile(
    r"plait (launch|generate|export|checkpoint|train \S+ --nnodes|train examples)|node1|hosts"
)
"""Commands that need other machines, a script or a run. test_launch.py and test_quickstart.py run
such commands."""
SLOW = re.compile(r"plait (train|verify|dryrun)|--world-size 128")
RUNNABLE = [line for line in COMMANDS if not ELSEWHERE.search(line)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Current folder with the files of the pages, under the names that the pages give them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    configs = [json.loads(block) for block in blocks_in("json")]
    for name, section in (("mine.json", "data"), ("run.json", "parallel")):
        (config,) = [config for config in configs if section in config and "model" in config]
        (tmp_path / name).write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def test_pages_have_commands():
    expected = {"plait plan models", "plait config explain mine.json", "plait verify run.json"}
    assert expected <= set(RUNNABLE)
    assert len(RUNNABLE) >= 8


@pytest.mark.parametrize("command", [line for line in RUNNABLE if not SLOW.search(line)])
def test_command(command, files, capsys):
    run_plait(command.removeprefix("plait "))
    assert capsys.readouterr().out.strip()


def normalised(line):
    """Return a line of output without the widths of its columns."""
    return " ".join(line.split())


NUMBER = r"\d[\d,]*(?:\\?\.\d+)?(?:e(?:\\?-|\+)?\d+)?"


def missing_lines(expected, output, *, numbers=True):
    """Return the lines of a page that are not in an output.

    `...` in a line stands for anything. Without `numbers`, any number equals any other.
    """
    printed = [normalised(line) for line in output.splitlines()]
    missing = []
    for line in expected:
        pattern = re.escape(normalised(line)).replace(r"\.\.\.", ".*")
        if not numbers:
            pattern = re.sub(NUMBER, lambda _: r"[\d,.e+-]+", pattern)
        if not any(re.fullmatch(pattern, other) for other in printed):
            missing.append(line)
    return missing


def output_of_the_page(beginning):
    """Return the lines of the block of output that begins with a text."""
    (block,) = [text for text in blocks_in("text") if text.startswith(beginning)]
    return [line for line in block.splitlines() if line.strip() not in ("", "...")]


def test_output_of_a_plan(files, capsys):
    (command,) = [line for line in COMMANDS if "llama-3-8b" in line]
    run_plait(command.removeprefix("plait "))
    lines = output_of_the_page("llama-3-8b:")
    # The page folds this line of the output into two.
    folded = next(index for index, line in enumerate(lines) if line.startswith("90 %:"))
    lines[folded : folded + 2] = [" ".join(lines[folded : folded + 2])]
    assert missing_lines(lines, capsys.readouterr().out) == []


def test_reference_pages_are_current(capsys):
    assert reference.main(["--check"]) == 0, capsys.readouterr().err


def test_links_lead_to_files():
    """Every relative link of the README and of docs leads to a file of the repository."""
    broken = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        broken.extend(
            f"{page.relative_to(ROOT)}: {target}"
            for target in targets
            if "://" not in target and not (page.parent / target).exists()
        )
    assert broken == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [line for line in RUNNABLE if SLOW.search(line)])
def test_slow_command(command, files):
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if command == "plait verify run.json":
        expected = output_of_the_page("model   llama, shrunk")
        assert missing_lines(expected, done.stdout, numbers=False) == []


def test_loop_without_an_engine():
    import torch

    import plait

    (block,) = [text for text in blocks_in("python") if "parallelize" in text]
    losses = []

    def mean_loss(output, micro_batch):
        loss = torch.nn.functional.mse_loss(output, micro_batch[1])
        losses.append(loss.item())
        return loss

    torch.manual_seed(1)
    x = torch.randn(8, 4)
    names = {
        "plait": plait,
        "torch": torch,
        "model": torch.nn.Linear(4, 1),
        "mean_loss": mean_loss,
        "batches": [(x, x.sum(1, keepdim=True))] * 20,
        "config": {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    }
    exec(block, names)
    assert sum(losses[-2:]) < sum(losses[:2])  # two micro-batches per step
    names["sharded"].close()


def test_asynchronous_checkpoints(tmp_path):
    import torch
    import torch.nn.functional as F

    import plait

    blocks = blocks_of(ROOT / "docs" / "reference" / "checkpoints.md")
    (block,) = [text for language, text in blocks if language == "python"]
    loss = plait.per_sample(lambda output, batch: F.mse_loss(output, batch[1], reduction="sum"))
    model = torch.nn.Linear(4, 1)
    engine = plait.initialize(model, {"train_micro_batch_size_per_gpu": 4}, loss_fn=loss)
    x = torch.randn(4, 4)
    batches = [(x, x.sum(1, keepdim=True))] * 25
    exec(block, {"engine": engine, "batches": batches, "folder": tmp_path})
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "step-00000010", "step-00000020"]
    loaded = engine.load_checkpoint(tmp_path)
    assert loaded is not None and loaded[1] == {"step": 20} and engine.global_steps == 20
    engine.close()
