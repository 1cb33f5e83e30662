"""Folders with quantised weights: Python loads them with Transformers, commands refuse them."""

import json
import re
from pathlib import Path

import pytest
import torch

import plait
from plait.cli.main import main
from plait.errors import InputError
from plait.inference.source import open_source
from tests.integration.model_folder import PAGE, model_folder

TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
}


@pytest.fixture(autouse=True)
def _process_group_is_closed():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def quantised(tmp_path):
    """A folder whose config.json has quantization_config."""
    folder = model_folder(tmp_path / "model")
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "quantization_config": TORCHAO}), encoding="utf-8")
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
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--model", str(quantised)])
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert "its weights are quantised (torchao)" in message
    assert f"plait.from_pretrained('{quantised}')" in message


def test_a_missing_quantisation_library_is_named(quantised, monkeypatch):
    from transformers.quantizers import quantizer_torchao

    monkeypatch.setattr(quantizer_torchao, "is_torchao_available", lambda: False)
    warning = r"in full in every process, because its weights are quantised \(torchao\)"
    with (
        pytest.warns(UserWarning, match=warning),
        pytest.raises(InputError, match=r"plait\.from_pretrained\(.*torchao"),
    ):
        plait.from_pretrained(quantised)


def test_the_page(tmp_path, monkeypatch, capsys):
    """The program of docs/how-to/generation.md, and the remedy of the refusal, both work."""
    pytest.importorskip("torchao", reason="torchao is not installed; `make torchao` runs this")
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "FOLDER")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (program,) = (block for block in blocks if "torchao" in block)
    with pytest.warns(UserWarning, match="its weights are quantised"):
        exec(program, {"plait": plait})
    tokens = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained("FOLDER-int8", dtype=torch.bfloat16)
    prompt = torch.tensor([[1, 2, 3]])
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    assert tokens == expected and len(tokens) == 4

    with pytest.raises(InputError) as error:
        open_source(Path("FOLDER-int8")).model()
    (remedy,) = re.findall(r"device: (plait\.generate\(.*\))$", str(error.value))
    torch.distributed.destroy_process_group()
    answers = eval(remedy, {"plait": plait, "prompts": [[1, 2, 3]]})
    assert answers[0].token_ids
