"""Scripts of the kind people have, in tests/scripts, none of which imports Plait: what to change in each, and how it is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[1] / "scripts"
DEEPSPEED_PYTHON = os.environ.get("PLAIT_DEEPSPEED_PYTHON", "")
"""The Python of an environment that has DeepSpeed beside Plait's packages."""


@dataclass(frozen=True)
class Script:
    """One of them."""

    name: str
    theirs: str
    """The lines that are changed: one import, one argument, or one call."""
    ours: str
    """What stands there instead."""
    rtol: float = 1e-5
    peer: str = "torch"
    """Which environment its author has: "torch" for this one, or "deepspeed"."""
    arguments: tuple[str, ...] = ()

    @property
    def path(self):
        """The script as its author wrote it."""
        return SCRIPTS / f"{self.name}.py"

    def changed(self, folder):
        """The script on Plait."""
        text = self.path.read_text(encoding="utf-8")
        assert text.count(self.theirs) == 1, (
            f"{self.name}: {self.theirs!r} is there {text.count(self.theirs)} times"
        )
        assert "plait" not in text.replace("Imports no Plait", ""), self.name
        found = folder / self.path.name
        found.write_text(text.replace(self.theirs, self.ours), encoding="utf-8")
        return found


def _ddp(name, line="from torch.nn.parallel import DistributedDataParallel as DDP\n"):
    return Script(name, line, line.replace("torch.nn.parallel", "plait.compat.torch"))


def of_deepspeed(name, *arguments):
    """A script whose import of DeepSpeed is changed."""
    return Script(
        f"deepspeed_{name}",
        "import deepspeed\n",
        "import plait.compat.deepspeed as deepspeed\n",
        rtol=2e-5,
        peer="deepspeed",
        arguments=arguments,
    )


def _trainer(name, trainer="Trainer"):
    return Script(
        f"trainer_{name}",
        f"from transformers import {trainer}\n",
        f"from plait.hf import {trainer}\n",
    )


def _trl(name, method):
    line = f"from trl import {method}Config, {method}Trainer\n"
    return Script(
        f"trl_{name}",
        line,
        f"import plait.hf\n{line}\n{method}Trainer = plait.hf.wrap({method}Trainer)\n",
    )


_ZERO_3 = 'import plait\n\n    plait.parallelize(model, {"zero_optimization": {"stage": 3}})\n'
_BY_LAYERS = """for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
"""
_STREAM = """for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer"""
_PLAN = """for layer in model.model.layers:
    parallelize_module(layer, init_device_mesh("cpu", (dist.get_world_size(),)), {**column, **row})
"""
ALL = (
    _ddp("ddp_convnet"),
    _ddp("ddp_accumulation", "from torch.nn.parallel import DistributedDataParallel\n"),
    _ddp("ddp_gpt"),
    _ddp("ddp_unused"),
    _ddp("ddp_reward"),
    *(
        Script(
            f"accelerate_{name}",
            "from accelerate import Accelerator\n",
            "from plait.hf import Accelerator\n",
        )
        for name in ("classifier", "no_trainer", "tokens", "lora")
    ),
    *(of_deepspeed(name) for name in ("pipeline", "zero_init", "own_optimizer", "resume", "llama")),
    Script("fsdp2_gpt", _BY_LAYERS, _ZERO_3),
    Script("fsdp2_accumulation", "shard(model)\n    optimizer", f"{_ZERO_3}    optimizer"),
    Script("fsdp2_stream", _STREAM, f"{_ZERO_3}optimizer".replace("\n    ", "\n")),
    Script(
        "torch_tensor_parallel",
        _PLAN,
        'import plait\n\nplait.parallelize(model, {"parallel": {"tp": 2}})\n',
    ),
    *(
        _trainer(name)
        for name in ("run_clm", "lora", "subclass", "classifier", "entities", "vision", "stream")
    ),
    _trainer("seq2seq", "Seq2SeqTrainer"),
    _trl("chat", "SFT"),
    _trl("preferences", "DPO"),
)


def launched(command, script, folder, *, arguments=(), seconds=300, may_abort=False, **more):
    """What every rank of a script printed after RESULT, by rank. It is run in `folder`; `more`: of the environment. `may_abort`: a process
    whose interpreter ends before gloo's threads do aborts, or waits for ever, after its work was done (`cluster.ending`)."""
    folder.mkdir(exist_ok=True)
    quiet = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment = {**os.environ, **quiet, "ACCELERATE_USE_CPU": "true", **more}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = subprocess.Popen(
        [*command, str(script), *arguments], cwd=folder, env=environment, **pipes
    )
    try:
        printed, errors = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        started.terminate()  # the launcher ends its processes, which have the pipes too
        printed, errors = started.communicate(timeout=60)
        assert may_abort, f"not at its end after {seconds} s\n{printed[-2000:]}{errors[-4000:]}"
    assert started.returncode == 0 or may_abort, printed[-2000:] + errors[-4000:]
    # Ranks may print into one line.
    found = [json.JSONDecoder().raw_decode(part)[0] for part in printed.split("RESULT ")[1:]]
    assert len(found) == 2, printed[-2000:] + errors[-4000:]
    return {rank: rest for rank, *rest in found}


def on_plait(script, folder):
    """The changed script on two processes."""
    return launched(
        [sys.executable, "-m", "plait", "launch", "--nproc-per-node", "2"],
        script.changed(folder),
        folder / "ours",
        arguments=script.arguments,
    )


def on_peer(script, folder):
    """The script as it is on two processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if script.peer != "deepspeed":
        return launched(
            [sys.executable, *torchrun],
            script.path,
            folder / "theirs",
            arguments=script.arguments,
            seconds=120,
            may_abort=True,
        )
    path = f"{Path(DEEPSPEED_PYTHON).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed looks for ninja
    return launched(
        [DEEPSPEED_PYTHON, *torchrun],
        script.path,
        folder / "theirs",
        arguments=script.arguments,
        seconds=120,
        may_abort=True,
        PATH=path,
        DS_ACCELERATOR="cpu",
        PYTHONPATH="",
    )
