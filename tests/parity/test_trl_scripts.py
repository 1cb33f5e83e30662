"""TRL's installed scripts on `plait launch` with two lines added, against themselves.

The scripts are `trl/scripts/sft.py` and `dpo.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parity import trainers, words
from tests.parity.trainers import zero

pytest.importorskip("trl")
pytestmark = pytest.mark.proof  # four runs of half a minute
SETTINGS = {
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
    """Run a script on the model and the data of a folder."""
    options = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data",
        **SETTINGS,
        **settings,
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    process = subprocess.run(
        [*command, str(script), *arguments],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]


@pytest.mark.parametrize(("name", "trainer"), [("sft", "SFTTrainer"), ("dpo", "DPOTrainer")])
def test_the_script(tmp_path, name, trainer):
    import trl.scripts

    trainers.model().save_pretrained(tmp_path / "model")
    words.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = words.texts() if name == "sft" else words.preferences()
    rows.to_json(tmp_path / "data" / "train.jsonl")
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(zero(3)))

    original = Path(trl.scripts.__path__[0]) / f"{name}.py"
    changed = tmp_path / f"{name}.py"
    text = original.read_text(encoding="utf-8")
    first_import = "import argparse\n"
    assert text.count(first_import) == 1
    wrapping = f"import plait.hf, trl\ntrl.{trainer} = plait.hf.wrap(trl.{trainer})\n"
    changed.write_text(text.replace(first_import, first_import + wrapping))

    alone = {"output_dir": tmp_path / "alone", "gradient_accumulation_steps": 2}
    run([sys.executable], original, tmp_path, **alone)
    launch = [sys.executable, "-m", "plait", "launch", "--nproc-per-node", "2"]
    on_two = {"output_dir": tmp_path / "on_two", "gradient_accumulation_steps": 1}
    run(launch, changed, tmp_path, deepspeed=config, **on_two)

    expected = load_file(tmp_path / "alone" / "model.safetensors")
    actual = load_file(tmp_path / "on_two" / "model.safetensors")
    assert expected.keys() == actual.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(
            actual[key], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    initial = load_file(tmp_path / "model" / "model.safetensors")
    assert not torch.equal(initial["lm_head.weight"], actual["lm_head.weight"])
