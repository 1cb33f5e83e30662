"""Commands and code of the README, the tutorials and the how-to guides run as they are printed (E5)."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.main import main
from tools import reference

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    ROOT / "docs" / "how-to" / "choose-a-layout.md",
    ROOT / "docs" / "how-to" / "many-machines.md",
    ROOT / "docs" / "how-to" / "reduce-memory.md",
]
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(
        r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
]
COMMANDS = [
    line.split("  #")[0].strip()
    for language, block in BLOCKS
    if not language
    for line in block.splitlines()
]
PLAIT = sorted({line for line in COMMANDS if line.startswith("plait ")})
ELSEWHERE = re.compile(
    r"plait (launch|generate|export|checkpoint|train \S+ --nnodes|train examples)|node1|hosts"
)
"""What needs other machines, or a script; or a run: `tests/integration/test_launch.py` and `test_quickstart.py` run such ones."""
SLOW = re.compile(r"plait (train|verify|dryrun)|--world-size 128")
HERE = [line for line in PLAIT if not ELSEWHERE.search(line)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Return a folder with the files of the pages, under the names that the pages give them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    trees = [json.loads(block) for language, block in BLOCKS if language == "json"]
    for name, section in (("mine.json", "data"), ("run.json", "parallel")):
        (tree,) = [tree for tree in trees if section in tree and "model" in tree]
        (tmp_path / name).write_text(json.dumps(tree), encoding="utf-8")
    return tmp_path


def test_the_commands_are_found():
    assert {"plait plan models", "plait config explain mine.json", "plait verify run.json"} <= set(
        HERE
    )
    assert len(HERE) >= 8


@pytest.mark.parametrize("command", [line for line in HERE if not SLOW.search(line)])
def test_a_command(command, files, capsys):
    try:
        main(shlex.split(command)[1:])
    except SystemExit as end:
        assert not end.code, capsys.readouterr().err
    assert capsys.readouterr().out.strip()


def words_of(line):
    """A line of output in one form, whatever the widths of its columns."""
    return " ".join(line.split())


def is_printed(line, printed, *, numbers=True):
    """Return True if a line of a page is in an output: `...` stands for anything, and without `numbers` one for another."""
    pattern = re.escape(words_of(line)).replace(r"\.\.\.", ".*")
    if not numbers:
        pattern = re.sub(
            r"\d[\d,]*(?:\\?\.\d+)?(?:e(?:\\?-|\+)?\d+)?", lambda _: r"[\d,.e+-]+", pattern
        )
    return any(re.fullmatch(pattern, one) for one in printed)


def shown(after):
    """The lines of the block of output that begins with these words."""
    (block,) = [
        block for language, block in BLOCKS if language == "text" and block.startswith(after)
    ]
    return [line for line in block.splitlines() if line.strip() not in ("", "...")]


def test_the_output_of_a_plan(files, capsys):
    """The page shows what the command prints, shortened, with a long line folded."""
    (command,) = [line for line in PLAIT if "llama-3-8b" in line]
    with pytest.raises(SystemExit):
        main(shlex.split(command)[1:])
    printed = [words_of(line) for line in capsys.readouterr().out.splitlines()]
    lines = shown("llama-3-8b:")
    folded = next(at for at, line in enumerate(lines) if line.startswith("90 %:"))
    lines[folded : folded + 2] = [" ".join(lines[folded : folded + 2])]
    assert [line for line in lines if not is_printed(line, printed)] == []


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
@pytest.mark.parametrize("command", [line for line in HERE if SLOW.search(line)])
def test_a_slow_command(command, files):
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if command == "plait verify run.json":
        printed = [words_of(line) for line in done.stdout.splitlines()]
        assert [
            line
            for line in shown("model   llama, shrunk")
            if not is_printed(line, printed, numbers=False)
        ] == []


def test_your_own_loop():
    """On one process, whose loss falls."""
    import torch

    import plait

    (block,) = [
        block for language, block in BLOCKS if language == "python" and "parallelize" in block
    ]
    torch.manual_seed(1)
    model, losses = torch.nn.Linear(4, 1), []

    def mean_loss(output, piece):
        loss = torch.nn.functional.mse_loss(output, piece[1])
        losses.append(loss.item())
        return loss

    x = torch.randn(8, 4)
    given = {
        "plait": plait,
        "torch": torch,
        "model": model,
        "mean_loss": mean_loss,
        "batches": [(x, x.sum(1, keepdim=True))] * 20,
    }
    names = {
        **given,
        "config": {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    }
    exec(block, names)
    assert sum(losses[-2:]) < sum(losses[:2])  # two micro-batches a step
    names["sharded"].close()


def test_checkpoints_beside_the_training(tmp_path, capsys):
    """Run the code of docs/reference/checkpoints.md."""
    import torch

    import plait

    page = (Path(__file__).parents[2] / "docs" / "reference" / "checkpoints.md").read_text(
        encoding="utf-8"
    )
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    loss = plait.per_sample(
        lambda output, batch: torch.nn.functional.mse_loss(output, batch[1], reduction="sum")
    )
    engine = plait.initialize(
        torch.nn.Linear(4, 1), {"train_micro_batch_size_per_gpu": 4}, loss_fn=loss
    )
    x = torch.randn(4, 4)
    exec(
        block, {"engine": engine, "batches": [(x, x.sum(1, keepdim=True))] * 25, "folder": tmp_path}
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "LATEST",
        "step-00000010",
        "step-00000020",
    ]
    loaded = engine.load_checkpoint(tmp_path)
    assert loaded is not None and loaded[1] == {"step": 20} and engine.global_steps == 20
    engine.close()
