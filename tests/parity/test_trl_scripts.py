"""TRL's own installed scripts, `trl/scripts/sft.py` and `dpo.py`, started by `plait launch` with two lines added, against themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parity import trainers, words

pytest.importorskip("trl")
pytestmark = pytest.mark.proof  # four runs of half a minute
COMMON = {
    "per_device_train_batch_size": 2,
    "num_train_epochs": 1,
    "learning_rate": 0.01,
    "optim": "sgd",
    "bf16": "false",
    "use_cpu": "true",
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "dtype": "float32",
}


def run(command, script, folder, **settings):
    """The script on a model and data of the folder."""
    given = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data",
        **COMMON,
        **settings,
    }
    arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
    }
    done = subprocess.run(
        [*command, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    ("name", "trainer", "config"),
    [
        pytest.param("sft", "SFTTrainer", {"zero_optimization": {"stage": 3}}, id="sft"),
        pytest.param("dpo", "DPOTrainer", {"zero_optimization": {"stage": 3}}, id="dpo"),
    ],
)
def test_the_script(tmp_path, name, trainer, config):
    import trl.scripts

    trainers.model().save_pretrained(tmp_path / "model")
    words.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (words.texts() if name == "sft" else words.preferences()).to_json(
        tmp_path / "data" / "train.jsonl"
    )
    (tmp_path / "ds.json").write_text(json.dumps(config))
    theirs = Path(trl.scripts.__path__[0]) / f"{name}.py"
    changed, text = tmp_path / f"{name}.py", theirs.read_text(encoding="utf-8")
    line = "import argparse\n"
    assert text.count(line) == 1
    changed.write_text(
        text.replace(
            line, f"{line}import plait.hf, trl\ntrl.{trainer} = plait.hf.wrap(trl.{trainer})\n"
        )
    )
    run(
        [sys.executable],
        theirs,
        tmp_path,
        output_dir=tmp_path / "alone",
        gradient_accumulation_steps=2,
    )
    launch = [sys.executable, "-m", "plait", "launch", "--nproc-per-node", "2"]
    run(
        launch,
        changed,
        tmp_path,
        output_dir=tmp_path / "here",
        gradient_accumulation_steps=1,
        deepspeed=tmp_path / "ds.json",
    )
    wanted, found = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("alone", "here")
    )
    first = load_file(tmp_path / "model" / "model.safetensors")
    assert wanted.keys() == found.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(
            found[key], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert not torch.equal(first["lm_head.weight"], found["lm_head.weight"])
