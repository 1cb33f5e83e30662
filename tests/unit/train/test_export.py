"""An export is complete and compared with its checkpoint, or refused without a folder."""

import errno
import json
import shutil
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from plait.checkpoint import load
from plait.checkpoint.windows import TensorRecord
from plait.errors import CheckpointError, InputError
from plait.inference.source import open_source
from plait.train import export as export_module
from plait.train.export import compare_generated, export
from tests.unit.inference.cache_models import LATENT
from tests.unit.inference.models import saved
from tests.unit.inference.ropes import KINDS, LONG


@pytest.fixture
def checkpoint():
    checkpoint = mock.Mock()
    checkpoint.manifest.metadata = {"global_steps": 3}
    return checkpoint


def replace_content(monkeypatch, model, tensors):
    """Give every checkpoint a model and its tensors, so that no test writes a checkpoint."""
    records = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        records.append((name, TensorRecord(dtype=dtype, shape=tuple(tensor.shape))))
    prefix = export_module.MODEL_START
    reader = mock.Mock(
        under=lambda _: records, read=lambda name: tensors[name.removeprefix(prefix)]
    )
    monkeypatch.setattr(export_module, "require_transformers", mock.Mock())
    monkeypatch.setattr(export_module, "Reader", lambda checkpoint: reader)
    monkeypatch.setattr(export_module, "build_described_model", lambda checkpoint, **_: model)


@pytest.fixture
def small(monkeypatch):
    """Every checkpoint has a model of one tensor."""
    model = nn.Linear(2, 2, bias=False)
    model.config = mock.Mock()
    model.config.save_pretrained = lambda folder: (folder / "config.json").write_text("{}")
    replace_content(monkeypatch, model, {"weight": torch.ones(2, 2)})


NO_SPACE = [
    SafetensorError("Error while serializing: No space left on device"),
    OSError(errno.ENOSPC, "No space left on device", "x"),
]


@pytest.mark.parametrize("error", NO_SPACE)
@pytest.mark.parametrize("function", ["save_file", "_sync"])
def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path, monkeypatch, small, error, function):
    monkeypatch.setattr(export_module, function, mock.Mock(side_effect=error))
    message = r"--out .*out cannot be written: .*No space left on device"
    with pytest.raises(InputError, match=message):
        export(mock.Mock(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(143), CheckpointError("its bytes have changed")]
)
def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch, small, error):
    monkeypatch.setattr(export_module, "save_file", mock.Mock(side_effect=error))
    with pytest.raises(type(error)):
        export(mock.Mock(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


class Router(nn.Module):
    """A model with a bias that stays in float32, and with integers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, dtype=torch.bfloat16, device="meta"))
        self.register_buffer("bias", torch.empty(2, device="meta"))
        self.register_buffer("count", torch.empty(2, dtype=torch.int64, device="meta"))
        self.config = SimpleNamespace(save_pretrained=lambda folder: None)


def test_another_dtype_applies_to_some_tensors(tmp_path, monkeypatch, checkpoint):
    tensors = {
        "weight": torch.tensor([0.1, 1]),
        "bias": torch.tensor([0.1, 1]),
        "count": torch.tensor([1_000_001, 1]),
    }
    replace_content(monkeypatch, Router(), tensors)
    result = export(checkpoint, tmp_path / "out", dtype=torch.bfloat16)
    written = load_file(tmp_path / "out" / "model.safetensors")
    dtypes = {name: tensor.dtype for name, tensor in written.items()}
    assert dtypes == {"weight": torch.bfloat16, "bias": torch.float32, "count": torch.int64}
    assert all(torch.equal(written[name], tensors[name]) for name in ("bias", "count"))
    assert result.size == 4 + 8 + 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_class_keeps_its_float32_parameters(dtype, monkeypatch):
    config = {"model_type": "deepseek_v3", **LATENT, "num_hidden_layers": 2}
    identity = {f"model.{name}": value for name, value in config.items()}
    monkeypatch.setattr(load.exact, "decode", lambda *_, **__: {"identity": identity})
    state = load.build_described_model(mock.Mock(), dtype=dtype).state_dict()
    bias = state["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert (bias.dtype, state["model.norm.weight"].dtype) == (torch.float32, dtype)


def test_folders_of_a_tokenizer_are_copied(tmp_path, small, checkpoint):
    tokenizer = tmp_path / "tokenizer"
    templates = tokenizer / "additional_chat_templates"
    templates.mkdir(parents=True)
    (templates / "tools.jinja").write_text("{{ messages }}")
    (tokenizer / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    assert export(checkpoint, out, tokenizer=tokenizer).step == 3
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    template = "additional_chat_templates/tools.jinja"
    assert written == {"config.json", "model.safetensors", "tokenizer.json", template}


def test_an_unreadable_file_of_a_tokenizer_is_named(tmp_path, small):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").symlink_to("nothing")
    with pytest.raises(InputError, match=r"tokenizer/tokenizer.json: .*No such file"):
        export(mock.Mock(), tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    assert not (tmp_path / ".out.tmp").exists()


def test_a_dangling_link_is_not_replaced(tmp_path, small):
    (tmp_path / "out").symlink_to("nothing")
    with pytest.raises(InputError, match="out: exists; pass another name, or remove it first"):
        export(mock.Mock(), tmp_path / "out")


def test_logits_and_tokens_are_compared(tmp_path, monkeypatch):
    """The weights of the folder are right, but Transformers computes something else with them."""
    right = tmp_path / "right"
    saved(right)
    monkeypatch.setattr(export_module, "Source", lambda *_: open_source(right))
    # Generation settings of the folder must not count.
    with_settings = shutil.copytree(right, tmp_path / "with_settings")
    settings = '{"do_sample": true, "repetition_penalty": 3.0, "eos_token_id": [1, 2, 3, 4]}'
    (with_settings / "generation_config.json").write_text(settings)
    for folder in (right, with_settings):
        result = compare_generated(mock.Mock(), folder)
        assert result.tokens == 64 and result.logits < 1e-4

    wrong = shutil.copytree(right, tmp_path / "wrong")
    config = json.loads((right / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    message = "^Transformers' logits differ by .* from those of the checkpoint, more than the tol"
    with pytest.raises(CheckpointError, match=message):
        compare_generated(mock.Mock(), wrong)
    (wrong / "config.json").write_text("{}")
    message = r"^Transformers cannot open it \(ValueError: Unrecognized model"
    with pytest.raises(CheckpointError, match=message):
        compare_generated(mock.Mock(), wrong)

    generate = export_module.generate

    def generate_another_token(*args, **settings):
        answers = generate(*args, **settings)
        answers[0].token_ids[8] += 1
        return answers

    monkeypatch.setattr(export_module, "generate", generate_another_token)
    message = "^greedy token 9 of 64 of Transformers differs from that of the checkpoint"
    with pytest.raises(CheckpointError, match=message):
        compare_generated(mock.Mock(), right)


@pytest.mark.parametrize(
    ("name", "fields"),
    [KINDS["longrope"], ("llama", {"rope_parameters": LONG})],
    ids=["phi3", "llama"],
)
def test_tokens_past_the_original_length_of_longrope(tmp_path, monkeypatch, name, fields):
    saved(tmp_path / "model", name, layers=2, **fields)
    monkeypatch.setattr(export_module, "Source", lambda *_: open_source(tmp_path / "model"))
    assert compare_generated(mock.Mock(), tmp_path / "model").tokens == 64


def test_a_folder_has_its_name_after_it_was_verified(tmp_path, small, checkpoint):
    """It is complete when it is compared, and removed if it is wrong."""
    settings = tmp_path / "settings.json"
    settings.write_text('{"eos_token_id": [1, 2]}')
    compared = []

    def reject(folder):
        compared.append((folder.name, sorted(path.name for path in folder.iterdir())))
        raise CheckpointError("its weights differ")

    export_to = partial(export, checkpoint, tmp_path / "out", generation=settings)
    remedy = "the exported folder was removed; export without --verify to keep it"
    with pytest.raises(CheckpointError, match=rf"^--out .*out: its weights differ; {remedy}$"):
        export_to(verify=reject)
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert compared == [(".out.tmp", files)]
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]

    export_to(verify=lambda folder: None)
    written = (tmp_path / "out" / "generation_config.json").read_text()
    assert written == '{"eos_token_id": [1, 2]}'
