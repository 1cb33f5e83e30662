"""Exporting: a refusal is a sentence, and no half-written folder stays."""

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
from plait.train import export
from plait.train import export as export_module
from tests.unit.inference.models import saved
from tests.unit.inference.ropes import KINDS, LONG


@pytest.fixture
def checkpoint():
    made = mock.Mock()
    made.manifest.metadata = {"global_steps": 3}
    return made


@pytest.fixture
def small(monkeypatch):
    """Every checkpoint has a model of one tensor."""
    model = nn.Linear(2, 2, bias=False)
    model.config = mock.Mock()
    model.config.save_pretrained = lambda folder: (folder / "config.json").write_text("{}")
    record = TensorRecord(dtype="float32", shape=(2, 2))
    reader = mock.Mock(under=lambda _: [("weight", record)], read=lambda _: torch.ones(2, 2))
    monkeypatch.setattr(export_module, "require_transformers", mock.Mock())
    monkeypatch.setattr(export_module, "Reader", lambda found: reader)
    monkeypatch.setattr(export_module, "build_described_model", lambda found, **_: model)


ERRORS = [
    SafetensorError("Error while serializing: No space left on device"),
    OSError(errno.ENOSPC, "No space left on device", "x"),
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("at", ["save_file", "_sync"])
def test_a_full_disk(tmp_path, monkeypatch, small, error, at):
    monkeypatch.setattr(export_module, at, mock.Mock(side_effect=error))
    words = r"--out .*out cannot be written: .*No space left on device"
    with pytest.raises(InputError, match=words):
        export_module.export(mock.Mock(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(143), CheckpointError("its bytes have changed")]
)
def test_what_ends_it_leaves_nothing(tmp_path, monkeypatch, small, error):
    monkeypatch.setattr(export_module, "save_file", mock.Mock(side_effect=error))
    with pytest.raises(type(error)):
        export_module.export(mock.Mock(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


class Router(nn.Module):
    """Model with tensors that no other dtype is for: a bias that its class keeps in float32, and a number."""

    def __init__(self, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, dtype=torch.bfloat16, device="meta"))
        self.register_buffer("bias", torch.empty(2, device="meta"))
        self.register_buffer("count", torch.empty(2, dtype=torch.int64, device="meta"))
        self.config = SimpleNamespace(save_pretrained=lambda folder: None)


def test_another_dtype_is_not_all_tensors(tmp_path, small, monkeypatch, checkpoint):
    tensors = {
        "weight": torch.tensor([0.1, 1]),
        "bias": torch.tensor([0.1, 1]),
        "count": torch.tensor([1_000_001, 1]),
    }
    records = [
        (name, TensorRecord(dtype=str(tensor.dtype).removeprefix("torch."), shape=(2,)))
        for name, tensor in tensors.items()
    ]
    reader = mock.Mock(
        under=lambda start: records,
        read=lambda name: tensors[name.removeprefix(export_module.MODEL_START)],
    )
    monkeypatch.setattr(export_module, "Reader", lambda found: reader)
    monkeypatch.setattr(export_module, "build_described_model", lambda found, dtype: Router())
    done = export_module.export(checkpoint, tmp_path / "out", dtype=torch.bfloat16)
    written = load_file(tmp_path / "out" / "model.safetensors")
    dtypes = {name: tensor.dtype for name, tensor in written.items()}
    assert dtypes == {"weight": torch.bfloat16, "bias": torch.float32, "count": torch.int64}
    assert all(torch.equal(written[name], tensors[name]) for name in ("bias", "count"))
    assert done.size == 4 + 8 + 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checkpoints_model_keeps_its_classs_float32(dtype, monkeypatch):
    config = {
        "model_type": "deepseek_v3", "n_group": 2, "topk_group": 1, "hidden_size": 16, "intermediate_size": 16,
        "moe_intermediate_size": 8, "num_hidden_layers": 1, "first_k_dense_replace": 0, "num_attention_heads": 2,
        "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 32,
    }  # fmt: skip
    identity = {f"model.{name}": value for name, value in config.items()}
    monkeypatch.setattr(load.exact, "decode", lambda *_, **__: {"identity": identity})
    state = load.build_described_model(mock.Mock(), dtype=dtype).state_dict()
    bias = state["model.layers.0.mlp.gate.e_score_correction_bias"]
    assert (bias.dtype, state["model.norm.weight"].dtype) == (torch.float32, dtype)


def test_a_tokenizer_with_a_folder(tmp_path, small, checkpoint):
    templates = tmp_path / "tokenizer" / "additional_chat_templates"
    templates.mkdir(parents=True)
    (templates / "tools.jinja").write_text("{{ messages }}")
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    out, tokenizer = tmp_path / "out", tmp_path / "tokenizer"
    assert export_module.export(checkpoint, out, tokenizer=tokenizer).step == 3
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    template = "additional_chat_templates/tools.jinja"
    assert written == {"config.json", "model.safetensors", "tokenizer.json", template}


def test_a_tokenizer_that_cannot_be_read(tmp_path, small):
    """The message names its file, and not --out alone."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").symlink_to("nothing")
    with pytest.raises(InputError, match=r"tokenizer/tokenizer.json: .*No such file"):
        export_module.export(mock.Mock(), tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    assert not (tmp_path / ".out.tmp").exists()


def test_a_dangling_link_is_in_the_way(tmp_path, small):
    (tmp_path / "out").symlink_to("nothing")
    with pytest.raises(InputError, match="out: exists; pass another name, or remove it first"):
        export_module.export(mock.Mock(), tmp_path / "out")


def test_logits_and_tokens_are_compared(tmp_path, monkeypatch):
    """The folder's tensors are right, but Transformers computes something else with it."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    saved(right)
    shutil.copytree(right, wrong)
    config = json.loads((right / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    of_others = shutil.copytree(right, tmp_path / "of_others")
    settings = '{"do_sample": true, "repetition_penalty": 3.0, "eos_token_id": [1, 2, 3, 4]}'
    (of_others / "generation_config.json").write_text(settings)
    monkeypatch.setattr(export, "Source", lambda *_: open_source(right))
    for folder in (right, of_others):
        result = export.compare_generated(mock.Mock(), folder)
        assert result.tokens == 64 and result.logits < 1e-4
    words = r"^Transformers' logits differ by .* from those of the checkpoint, more than the tolerance of"
    with pytest.raises(CheckpointError, match=words):
        export.compare_generated(mock.Mock(), wrong)
    generate = export.generate

    def other(*args, **settings):
        made = generate(*args, **settings)
        made[0].token_ids[8] += 1
        return made

    monkeypatch.setattr(export, "generate", other)
    words = "^greedy token 9 of 64 of Transformers differs from that of the checkpoint"
    with pytest.raises(CheckpointError, match=words):
        export.compare_generated(mock.Mock(), right)
    (wrong / "config.json").write_text("{}")
    words = r"^Transformers cannot open it \(ValueError: Unrecognized model"
    with pytest.raises(CheckpointError, match=words):
        export.compare_generated(mock.Mock(), wrong)


@pytest.mark.parametrize(
    ("name", "fields"),
    [KINDS["longrope"], ("llama", {"rope_parameters": LONG})],
    ids=["phi3", "llama"],
)
def test_tokens_past_the_original_length_of_longrope(tmp_path, monkeypatch, name, fields):
    saved(tmp_path / "model", name, layers=2, **fields)
    monkeypatch.setattr(export, "Source", lambda *_: open_source(tmp_path / "model"))
    assert export.compare_generated(mock.Mock(), tmp_path / "model").tokens == 64


def test_what_was_not_verified_has_no_name(tmp_path, small, checkpoint):
    """The folder is complete when it is compared, and is removed where it is not right."""
    settings, seen = tmp_path / "settings.json", []
    settings.write_text('{"eos_token_id": [1, 2]}')

    def verify(folder):
        seen.append((folder.name, sorted(path.name for path in folder.iterdir())))
        raise CheckpointError("its weights differ")

    export_to = partial(export_module.export, checkpoint, tmp_path / "out", generation=settings)
    words = r"^--out .*out: its weights differ; the exported folder was removed; export without --verify to keep it$"
    with pytest.raises(CheckpointError, match=words):
        export_to(verify=verify)
    assert seen == [(".out.tmp", ["config.json", "generation_config.json", "model.safetensors"])]
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]
    export_to(verify=lambda folder: None)
    written = (tmp_path / "out" / "generation_config.json").read_text()
    assert written == '{"eos_token_id": [1, 2]}'
