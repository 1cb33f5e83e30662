"""What other libraries do with some of these faults: torch's distributed checkpoints (DCP), the Trainer of Transformers, and DeepSpeed
where it is installed.

Their checkpoints are written as their documents show. A loaded checkpoint is a mixture where its tensors are of more than one step.
"""

from __future__ import annotations

import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tools.faults.forks import Notes, Ranks

TENSORS, ELEMENTS, STEPS = 8, 1 << 18, 60


@dataclass
class Score:
    """Of one way to write checkpoints."""

    library: str
    kills: int = 0
    lost: int = 0
    """Kills after which no checkpoint could be loaded, or not the newest, without deleting something by hand."""
    mixed: int = 0
    flips: int = 0
    silent: int = 0
    """Of them: loaded, with other tensors and without an error."""
    wrong: list[str] = field(default_factory=list)
    """Empty: nothing is promised here."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def rows(folder: Path, kills: int) -> Iterator[dict[str, Any]]:
    """One for each; `flips` are five times as many."""
    yield _score(Score("Plait, one tag"), folder / "plait", kills, _plait_save, _plait_load).plain()
    yield _score(Score("DCP, one folder"), folder / "dcp", kills, _dcp_save, _dcp_load).plain()
    yield _score(
        Score("DCP, a folder a step, the newest with `.metadata`"),
        folder / "steps",
        kills,
        _dcp_steps,
        _dcp_newest,
    ).plain()
    yield _score(
        Score("Transformers Trainer, `resume_from_checkpoint=True`"),
        folder / "hf",
        kills,
        _trainer_save,
        _trainer_load,
        world=1,
    ).plain()
    if find_spec("deepspeed") is not None:
        name = f"DeepSpeed {version('deepspeed')}, a tag a step, `load_checkpoint(folder)`"
        yield _score(
            Score(name), folder / "deepspeed", kills, _deepspeed_save, _deepspeed_load, world=1
        ).plain()


Save = Callable[[Path, int, dict[str, torch.Tensor], Any], Any]
"""(folder, step, tensors, what the call before returned)."""
Load = Callable[[Path], list[torch.Tensor] | None]
"""The tensors; None where there is no checkpoint."""


def _score(
    score: Score, folder: Path, kills: int, save: Save, load: Load, *, world: int = 2
) -> Score:
    chance = random.Random(0)
    folder.mkdir(parents=True)
    notes, log = Notes(folder / "notes"), folder / "log"
    for kill in range(kills):
        before = len(notes.read("saved"))
        ranks = Ranks(_saving, world, str(folder), save, log=log)
        ends = time.monotonic() + 60
        while (
            time.monotonic() < ends
            and ranks.poll()
            and len(notes.read("saved")) < before + 2 * world
        ):
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.3))
        ranks.kill(kill % world)
        ranks.wait(60)
        score.kills += 1
        value = _loaded(folder, load, log)
        newest = max((step for _, _, step in notes.read("saved")), default=0)
        if value is None or (value != "mixed" and float(value) < newest):
            score.lost += 1
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            notes.path.unlink()
        score.mixed += value == "mixed"
    _flips(score, folder, load, save, chance, log, world)
    return score


def _flips(
    score: Score, folder: Path, load: Load, save: Save, chance: random.Random, log: Path, world: int
) -> None:
    """In the files that hold the weights, of one checkpoint."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    Ranks(_saving, world, str(folder), save, 1, log=log).wait(60)
    if _loaded(folder, load, log) in (None, "mixed"):
        raise SystemExit(
            f"{score.library}: an undamaged checkpoint was not loaded:\n{log.read_text()[-2000:]}"
        )
    files = sorted(
        path
        for path in (folder / "checkpoints").rglob("*")
        if path.suffix in (".safetensors", ".distcp", ".pt")
    )
    for _ in range(5 * score.kills):
        path = chance.choice(files)
        raw = path.read_bytes()
        at = chance.randrange(len(raw))
        with path.open("r+b") as stream:
            stream.seek(at)
            stream.write(bytes([raw[at] ^ (1 << chance.randrange(8))]))
        score.flips += 1
        score.silent += _loaded(folder, load, log) == "mixed"
        path.write_bytes(raw)


def _saving(rank: int, folder: str, save: Save, steps: int = STEPS) -> None:
    """A rank that saves again and again: every element of the tensors of a step is its number."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    notes, kept = Notes(Path(folder) / "notes"), None
    first = int(max((step for _, _, step in notes.read("saved")), default=0)) + 1
    for step in range(first, first + steps):
        tensors = {f"t{index}": torch.full((ELEMENTS,), float(step)) for index in range(TENSORS)}
        kept = save(Path(folder) / "checkpoints", step, tensors, kept)
        notes.add("saved", step)


def _loaded(folder: Path, load: Load, log: Path) -> str | None:
    """The step that was loaded, `mixed`, or None; in a process of its own."""
    answer = folder / "answer"
    answer.unlink(missing_ok=True)
    Ranks(_answer, 1, str(folder / "checkpoints"), str(answer), load, log=log).wait(60)
    return (answer.read_text() or None) if answer.exists() else None


def _answer(rank: int, checkpoints: str, answer: str, load: Load) -> None:
    warnings.simplefilter("ignore")
    found = load(Path(checkpoints))
    if found is not None:
        values = {float(value) for tensor in found for value in (tensor.min(), tensor.max())}
        Path(answer).write_text(str(values.pop()) if len(values) == 1 else "mixed")


def _plait_save(folder: Path, step: int, tensors: dict[str, torch.Tensor], kept: Any) -> Any:
    from plait.checkpoint.save import snapshot, write
    from plait.cluster.layout import Layout
    from plait.cluster.mesh import build_mesh

    mesh = kept or build_mesh(Layout(dp_replicate=2))
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    write(
        snapshot(folder, "last", mesh=mesh, tensors=named, rank_tensors={}, values={}, metadata={})
    )
    return mesh


def _plait_load(folder: Path) -> list[torch.Tensor] | None:
    from plait.checkpoint.folder import find_checkpoint
    from plait.checkpoint.load import Reader

    found = find_checkpoint(folder)
    if found is None:
        return None
    reader = Reader(found)
    reader.verify("full")
    return [reader.read(name) for name in reader.tensors]


def _dcp_save(folder: Path, step: int, tensors: dict[str, torch.Tensor], kept: Any) -> Any:
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, checkpoint_id=folder / "last")


def _dcp_load(folder: Path) -> list[torch.Tensor] | None:
    return _dcp_read(folder / "last")


def _dcp_steps(folder: Path, step: int, tensors: dict[str, torch.Tensor], kept: Any) -> Any:
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, checkpoint_id=folder / f"step-{step:06d}")
    if int(os.environ["RANK"]) == 0:
        for old in sorted(folder.iterdir())[:-3]:
            shutil.rmtree(old, ignore_errors=True)


def _dcp_newest(folder: Path) -> list[torch.Tensor] | None:
    complete = sorted(path for path in folder.iterdir() if (path / ".metadata").exists())
    return _dcp_read(complete[-1]) if complete else None


def _dcp_read(path: Path) -> list[torch.Tensor] | None:
    import torch.distributed.checkpoint as dcp

    if not (path / ".metadata").exists():
        return None
    tensors = {f"t{index}": torch.zeros(ELEMENTS) for index in range(TENSORS)}
    dcp.load(tensors, checkpoint_id=path)
    return list(tensors.values())


def _trainer_save(folder: Path, step: int, tensors: dict[str, torch.Tensor], kept: Any) -> Any:
    trainer = kept or _trainer(folder)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(tensors[name])
    trainer.state.global_step = step
    trainer._save_checkpoint(trainer.model, trial=None)
    return trainer


def _trainer_load(folder: Path) -> list[torch.Tensor] | None:
    from transformers.trainer_utils import get_last_checkpoint

    last = get_last_checkpoint(str(folder))
    if last is None:
        return None
    trainer = _trainer(folder)
    trainer._load_from_checkpoint(last)
    trainer._load_optimizer_and_scheduler(last)
    return [parameter.detach() for parameter in trainer.model.parameters()]


def _trainer(folder: Path) -> Any:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class Config(PretrainedConfig):
        """Of a model of plain tensors."""

        model_type = "plain"

    class Model(PreTrainedModel):
        """Tensors by name."""

        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for index in range(TENSORS):
                setattr(self, f"t{index}", nn.Parameter(torch.zeros(ELEMENTS)))
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            """They are given."""

    arguments = TrainingArguments(
        output_dir=str(folder), save_total_limit=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(model=Model(Config()), args=arguments)
    trainer.create_optimizer_and_scheduler(100)
    return trainer


def _deepspeed_save(folder: Path, step: int, tensors: dict[str, torch.Tensor], kept: Any) -> Any:
    from deepspeed.utils import safe_set_full_fp32_param

    engine = kept or _deepspeed()
    for name, parameter in engine.module.named_parameters():
        parameter.data.copy_(tensors[name])
        safe_set_full_fp32_param(parameter, tensors[name])
    engine.global_steps = step
    engine.save_checkpoint(str(folder), tag=f"step-{step:06d}")
    for old in sorted(path for path in folder.iterdir() if path.is_dir())[:-3]:
        shutil.rmtree(old, ignore_errors=True)
    return engine


def _deepspeed_load(folder: Path) -> list[torch.Tensor] | None:
    engine = _deepspeed()
    path, _ = engine.load_checkpoint(str(folder))
    if path is None:
        return None
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = list(engine.module.parameters())
    return [parameter.detach() for parameter in parameters] + [
        safe_get_full_fp32_param(parameter) for parameter in parameters
    ]


def _deepspeed() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from torch import nn

    class Model(nn.Module):
        """Plain tensors."""

        def __init__(self) -> None:
            super().__init__()
            for index in range(TENSORS):
                setattr(self, f"t{index}", nn.Parameter(torch.zeros(ELEMENTS)))

    model = Model()
    settings = {"train_batch_size": 1, "zero_optimization": {"stage": 1}}
    settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings
    )
    return engine
