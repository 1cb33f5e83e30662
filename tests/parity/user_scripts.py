"""Scripts as users have them, in tests/scripts: what to change in each, and how to run it.

None of them imports Plait.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "scripts"
DEEPSPEED_PYTHON = os.environ.get("PLAIT_DEEPSPEED_PYTHON", "")
"""The Python of an environment that has DeepSpeed and Plait's packages."""


@dataclass(frozen=True)
class Script:
    """A script and the change that runs it on Plait."""

    name: str
    original: str
    """The lines that are changed: one import, one argument, or one call."""
    replacement: str
    rtol: float = 1e-5
    environment: str = "torch"
    """Environment in which the original runs: "torch" for this one, or "deepspeed"."""
    arguments: tuple[str, ...] = ()

    @property
    def path(self):
        return FOLDER / f"{self.name}.py"

    def changed(self, folder):
        """Write the changed script to a folder, and return its path."""
        text = self.path.read_text(encoding="utf-8")
        count = text.count(self.original)
        assert count == 1, f"{self.name} contains {self.original!r} {count} times"
        assert "plait" not in text.replace("Imports no Plait", ""), self.name
        path = folder / self.path.name
        path.write_text(text.replace(self.original, self.replacement), encoding="utf-8")
        return path


def _ddp_script(name, line="from torch.nn.parallel import DistributedDataParallel as DDP\n"):
    return Script(f"ddp_{name}", line, line.replace("torch.nn.parallel", "plait.compat.torch"))


def deepspeed_script(name, *arguments):
    """Return a script whose import of DeepSpeed is changed."""
    return Script(
        f"deepspeed_{name}",
        "import deepspeed\n",
        "import plait.compat.deepspeed as deepspeed\n",
        rtol=2e-5,
        environment="deepspeed",
        arguments=arguments,
    )


def _accelerate_script(name):
    line = "from accelerate import Accelerator\n"
    return Script(f"accelerate_{name}", line, line.replace("accelerate", "plait.hf"))


def _trainer_script(name, trainer="Trainer"):
    line = f"from transformers import {trainer}\n"
    return Script(f"trainer_{name}", line, line.replace("transformers", "plait.hf"))


def _trl_script(name, method):
    line = f"from trl import {method}Config, {method}Trainer\n"
    wrapping = f"\n{method}Trainer = plait.hf.wrap({method}Trainer)\n"
    return Script(f"trl_{name}", line, f"import plait.hf\n{line}{wrapping}")


_ZERO_3 = 'import plait\n\n    plait.parallelize(model, {"zero_optimization": {"stage": 3}})\n'
_SHARD_BY_LAYERS = """for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
"""
_SHARD_AT_TOP_LEVEL = """for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer"""
_PARALLELIZE = """for layer in model.model.layers:
    parallelize_module(layer, init_device_mesh("cpu", (dist.get_world_size(),)), {**column, **row})
"""
SCRIPTS = (
    _ddp_script("convnet"),
    _ddp_script("accumulation", "from torch.nn.parallel import DistributedDataParallel\n"),
    _ddp_script("gpt"),
    _ddp_script("unused"),
    _ddp_script("reward"),
    *map(_accelerate_script, ("classifier", "no_trainer", "tokens", "lora")),
    *map(deepspeed_script, ("pipeline", "zero_init", "own_optimizer", "resume", "llama")),
    Script("fsdp2_gpt", _SHARD_BY_LAYERS, _ZERO_3),
    Script("fsdp2_accumulation", "shard(model)\n    optimizer", f"{_ZERO_3}    optimizer"),
    Script("fsdp2_stream", _SHARD_AT_TOP_LEVEL, f"{_ZERO_3}optimizer".replace("\n    ", "\n")),
    Script(
        "torch_tensor_parallel",
        _PARALLELIZE,
        'import plait\n\nplait.parallelize(model, {"parallel": {"tp": 2}})\n',
    ),
    *map(
        _trainer_script,
        ("run_clm", "lora", "subclass", "classifier", "entities", "vision", "stream"),
    ),
    _trainer_script("seq2seq", "Seq2SeqTrainer"),
    _trl_script("chat", "SFT"),
    _trl_script("preferences", "DPO"),
)


def run(command, script, folder, *, arguments=(), seconds=300, may_abort=False, **variables):
    """Run a script in a folder, and return what each rank printed after RESULT, by rank.

    Args:
        command: Command that starts the processes.
        script: Path of the script.
        folder: Working directory, which is created.
        arguments: Arguments of the script.
        seconds: Time limit.
        may_abort: Accept an exit code or a timeout after the results. A process whose interpreter
            ends before gloo's threads aborts, or waits forever, after its work
            (`cluster.ending`).
        variables: Further environment variables.
    """
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_USE_CPU": "true",
        **variables,
    }
    process = subprocess.Popen(
        [*command, str(script), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # The launcher ends its processes, which have the pipes too.
        process.terminate()
        output, errors = process.communicate(timeout=60)
        assert may_abort, f"timeout after {seconds} s\n{output[-2000:]}{errors[-4000:]}"
    assert process.returncode == 0 or may_abort, output[-2000:] + errors[-4000:]

    # Ranks may print into one line, so each result is parsed up to its end.
    texts = output.split("RESULT ")[1:]
    results = [json.JSONDecoder().raw_decode(text)[0] for text in texts]
    assert len(results) == 2, output[-2000:] + errors[-4000:]
    return {rank: numbers for rank, *numbers in results}


def run_on_plait(script, folder):
    """Run the changed script in two processes."""
    launch = [sys.executable, "-m", "plait", "launch", "--nproc-per-node", "2"]
    changed = script.changed(folder)
    return run(launch, changed, folder / "on_plait", arguments=script.arguments)


def run_original(script, folder):
    """Run the original script in two processes."""
    python = sys.executable
    variables = {}
    if script.environment == "deepspeed":
        python = DEEPSPEED_PYTHON
        # DeepSpeed looks for ninja in PATH.
        path = f"{Path(DEEPSPEED_PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {"PATH": path, "DS_ACCELERATOR": "cpu", "PYTHONPATH": ""}
    return run(
        [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        script.path,
        folder / "original",
        arguments=script.arguments,
        seconds=120,
        may_abort=True,
        **variables,
    )
