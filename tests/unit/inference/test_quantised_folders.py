"""Folders whose config.json has quantization_config: loaded by Transformers in Python, refused by the commands that count weights."""

import json
import re
from pathlib import Path

import pytest
import torch

import plait
from plait.cli.main import main
from plait.errors import InputError
from plait.inference.source import open_source
from tests.integration.model_folder import model_folder

PAGE = (Path(__file__).parents[3] / "docs/how-to/generation.md").read_text(encoding="utf-8")
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
}


@pytest.fixture
def quantised(tmp_path):
    """A folder that says its weights are quantised."""
    folder = model_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": TORCHAO}), encoding="utf-8"
    )
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "a"],
        ["generate", "--prompt", "a", "--cpu-budget", "1MiB"],
        ["plan", "infer"],
    ],
)
def test_commands_refuse_it_with_a_remedy(command, quantised, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--model", str(quantised)])
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert (
        "its weights are quantised (torchao)" in shown
        and f"plait.from_pretrained('{quantised}')" in shown
    )


def test_a_library_that_is_not_installed(quantised, monkeypatch):
    from transformers.quantizers import quantizer_torchao

    monkeypatch.setattr(quantizer_torchao, "is_torchao_available", lambda: False)
    with (
        pytest.warns(
            UserWarning,
            match=r"in full in every process, because its weights are quantised \(torchao\)",
        ),
        pytest.raises(InputError, match=r"plait\.from_pretrained\(.*torchao"),
    ):
        plait.from_pretrained(quantised)


def test_the_page(tmp_path, monkeypatch, capsys):
    """The page's program, and the remedy of the refusal."""
    pytest.importorskip("torchao", reason="torchao is not installed; `make torchao` runs this")
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "FOLDER")
    (program,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        if "torchao" in block
    )
    with pytest.warns(UserWarning, match="its weights are quantised"):
        exec(program, {"plait": plait})
    tokens = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained("FOLDER-int8", dtype=torch.bfloat16)
    prompt = torch.tensor([[1, 2, 3]])
    assert prompt.shape[1] + len(tokens) == 7
    assert tokens == model.generate(prompt, max_new_tokens=4, do_sample=False)[0, 3:].tolist()

    with pytest.raises(InputError) as refused:
        open_source(Path("FOLDER-int8")).model()
    (remedy,) = re.findall(r"device: (plait\.generate\(.*\)); or ", str(refused.value))
    torch.distributed.destroy_process_group()
    made = eval(remedy, {"plait": plait, "prompts": [[1, 2, 3]]})
    assert made[0].token_ids


@pytest.fixture(autouse=True)
def _closed():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
