"""Checkpoints of DeepSpeed (made by tools/deepspeed_fixtures.py) and of torch are converted.

No code in them is executed.
"""

import contextlib
import copy
import io
import pickle
import re
import shutil
import sys
import zipfile
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict
from typer.testing import CliRunner

import plait
import plait.compat.deepspeed as deepspeed
from plait import exact
from plait.checkpoint.foreign import content, convert
from plait.checkpoint.foreign.unpickle import read_pickle, read_torch
from plait.checkpoint.inspect import open_checkpoint, verify
from plait.checkpoint.load import Reader
from plait.checkpoint.places import place_of
from plait.cli.checkpoint import import_app as app
from plait.errors import CheckpointError, InputError, PlaitError
from tests.advice import check, command, table
from tests.unit.checkpoint.canary import Canary

FIXTURES = Path(__file__).parent / "deepspeed"


@pytest.fixture(autouse=True)
def _process_group_is_closed():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Model(nn.Module):
    """The model of tools/deepspeed_fixtures.py: two groups, a frozen weight, a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7, bias=False)
        self.last = nn.Linear(7, 3, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("mean", torch.arange(3.0))

    def forward(self, x):
        return (self.last(self.frozen(self.first(x).relu())) - self.mean).square().mean()


def trained():
    """Return model and optimizer after the steps of the fixtures, in plain torch."""
    torch.manual_seed(0)
    model = Model()
    rows = torch.randn(4, 5)
    groups = [
        {"params": [model.first.weight, model.last.weight], "weight_decay": 0.1},
        {"params": [model.first.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98))
    for _ in range(3):
        optimizer.zero_grad()
        model(rows).backward()
        optimizer.step()
    return model, optimizer


def run_in_this_process(arguments, **_):
    """Stand in for `subprocess.run`, because a process takes seconds. One test starts it."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        convert.main(*arguments[3:])
    return SimpleNamespace(stdout=output.getvalue(), stderr="", returncode=0)


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(convert.subprocess, "run", run_in_this_process)


def compare(out, *, rtol):
    """Compare a converted checkpoint with plain torch, and return its reader."""
    model, optimizer = trained()
    checkpoint = open_checkpoint(place_of(out))
    verify(checkpoint, lambda done, of: None)
    reader = Reader(checkpoint)
    expected = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, states in optimizer.state.items():
        prefix = f"optimizer.state.{names[parameter]}"
        expected |= {f"{prefix}.{key}": value for key, value in states.items()}
    assert set(reader.tensors) == set(expected)
    tensors = {name: reader.read(name) for name in expected}
    torch.testing.assert_close(tensors, expected, rtol=rtol, atol=1e-7)

    decays = {}
    for group in checkpoint.manifest.metadata["optimizer"]["groups"]:
        decays[tuple(group["params"])] = exact.decode(group["now"]["weight_decay"])
    assert decays == {("first.bias",): 0.0, ("first.weight", "last.weight"): 0.1}
    loaded = Model()
    plait.load_trained(loaded, out)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=rtol, atol=1e-7)
    return reader


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(tmp_path, in_this_process, stage):
    result = convert.convert(FIXTURES / f"zero{stage}", str(tmp_path / "out"))
    assert f"ZeRO {stage}, 2 ranks" in result.kind
    assert (result.steps, result.tensors, result.states) == (3, 5, 9)
    metadata = compare(tmp_path / "out", rtol=1e-5).manifest.metadata
    assert exact.decode(metadata["client_state"]) == {"epoch": 2, "name": "x"}
    assert metadata["global_steps"] == 3
    assert any("generators" in name for name in result.left_out)


def test_the_command_starts_the_process_that_reads(tmp_path):
    arguments = [str(FIXTURES / "zero3"), "--out", str(tmp_path / "out"), "--tag", "theirs"]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    assert "step 3, 5 tensors and 9 states" in run.output
    assert "not converted: generators" in run.output
    assert compare(tmp_path / "out", rtol=1e-5).path == tmp_path / "out" / "theirs"


CONVERTED = "zero1-plait"
ADVICE = f"""
import gone --out a -> name one that DeepSpeed or torch.distributed.checkpoint wrote\
 -> import zero1 --out a
import zero1 --out {CONVERTED} -> name a new folder -> import zero1 --out b
checkpoint ls gone -> name one that holds checkpoints -> checkpoint ls {CONVERTED}
checkpoint verify gone -> name a checkpoint, or a folder of checkpoints\
 -> checkpoint verify {CONVERTED} | checkpoint verify {CONVERTED}/step-00000003
"""


def test_advice(tmp_path, monkeypatch, capsys, in_this_process):
    """A script that loads a checkpoint of DeepSpeed gets the command that converts it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "zero1", "zero1")
    model, optimizer = trained()
    optimizer = torch.optim.AdamW(optimizer.param_groups)
    config = {"train_batch_size": 4}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with pytest.raises(CheckpointError, match="was written by DeepSpeed") as error:
        engine.load_checkpoint("zero1")
    run = command(capsys)
    run(re.search(r"`plait (.*)`", str(error.value))[1])
    expected = copy.deepcopy(engine.module_state_dict())
    with torch.no_grad():
        engine.module.first.weight.zero_()
    folder = re.search(r"and load (\S+)$", str(error.value))[1]
    assert engine.load_checkpoint(folder)[0] is not None
    torch.testing.assert_close(engine.module_state_dict(), expected, rtol=1e-5, atol=1e-7)
    check(table(ADVICE, run))


def test_a_harmful_file_ends_the_command(tmp_path, in_this_process):
    """The exit code is that of a damaged checkpoint."""
    shutil.copytree(FIXTURES / "zero1", tmp_path / "bad")
    file = next((tmp_path / "bad").rglob("*rank_0*optim*"))
    torch.save({"optimizer_state_dict": Canary(tmp_path / "executed")}, file)
    run = CliRunner().invoke(app, [str(tmp_path / "bad"), "--out", str(tmp_path / "other")])
    assert isinstance(run.exception, CheckpointError) and run.exception.exit_code == 4
    assert "posix.mkdir" in str(run.exception)
    assert not (tmp_path / "executed").exists() and not (tmp_path / "other").exists()


def save_with_torch(folder):
    weights, states = get_state_dict(*trained())
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder, no_dist=True)


def test_torch_distributed_checkpoint(tmp_path, in_this_process):
    save_with_torch(tmp_path / "dcp")
    convert.convert(tmp_path / "dcp", str(tmp_path / "out"))
    compare(tmp_path / "out", rtol=0)


class ZeroStageEnum(IntEnum):
    """Stands in for the enum of DeepSpeed."""

    gradients = 2


class GetAttribute:
    """Pickled, it is a call of `getattr` with these arguments."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_enums_of_python_3_11_0(tmp_path, monkeypatch, in_this_process):
    """Python 3.11.0 to 3.11.3 (Debian 12) pickle a member as `getattr(EnumClass, "MEMBER")`."""

    def reduce_ex(member, _protocol):
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce_ex)
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", reduce_ex)
    # The pickle must have DeepSpeed's name of the class.
    monkeypatch.setattr(ZeroStageEnum, "__module__", "deepspeed.runtime.zero.config")
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero"):
        monkeypatch.setitem(sys.modules, name, sys.modules[__name__])
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.config", sys.modules[__name__])
    torch.save({"zero_stage": ZeroStageEnum.gradients}, tmp_path / "states.pt")
    assert read_torch(tmp_path / "states.pt")["zero_stage"].args == (2,)

    save_with_torch(tmp_path / "dcp")
    assert b"getattr" in (tmp_path / "dcp" / ".metadata").read_bytes()
    convert.convert(tmp_path / "dcp", str(tmp_path / "out"))
    compare(tmp_path / "out", rtol=0)


def test_any_other_getattr_is_refused(tmp_path):
    """Only the listed members of the listed enums are read, in every protocol."""
    plain = tmp_path / "plain"
    for entry in (
        GetAttribute(_MEM_FORMAT_ENCODING, "__class__"),
        GetAttribute(_MEM_FORMAT_ENCODING, "mro"),
        GetAttribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST", None),
        GetAttribute(MetadataIndex, "__init__"),
        GetAttribute(torch.Tensor, "__reduce_ex__"),
        GetAttribute(GetAttribute(str, "format"), "__self__"),
        GetAttribute({}, "__class__"),
        GetAttribute("text", "format"),
        GetAttribute([], "TORCH_CHANNELS_LAST"),
    ):
        for protocol in (0, 2, 4, 5):
            plain.write_bytes(pickle.dumps(entry, protocol))
            with pytest.raises(CheckpointError, match="cannot be read"):
                read_pickle(plain)
        torch.save(entry, tmp_path / "torch")
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_torch(tmp_path / "torch")
    plain.write_bytes(pickle.dumps(getattr))
    assert read_pickle(plain) is not getattr


def change_metadata(source, edit):
    """Save a checkpoint of torch, and change its metadata."""
    dcp.save({"model": {"x": torch.ones(3)}, "y": "text"}, checkpoint_id=source, no_dist=True)
    file = source / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def pickled_metadata(source, canary):
    change_metadata(source, lambda _: None)
    (source / ".metadata").write_bytes(pickle.dumps(canary))


def pickled_item(source, canary):
    def edit(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.x":
                file = source / "item.pt"
                torch.save(canary, file)
                info.relative_path = file.name
                info.offset = 0
                info.length = file.stat().st_size

    change_metadata(source, edit)


def path_above(source, _canary):
    def edit(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../other"

    change_metadata(source, edit)


def copy_deepspeed(source, pattern="*rank_1*optim*"):
    """Copy a checkpoint of DeepSpeed, and return one of its files."""
    shutil.copytree(FIXTURES / "zero2", source)
    return next((source / "step3").glob(pattern))


def pickled_optimizer(source, canary):
    torch.save({"optimizer_state_dict": canary}, copy_deepspeed(source))


def pickled_model(source, canary):
    torch.save({"optimizer_state_dict": canary}, copy_deepspeed(source, "*model_states*"))


def compressed(source, _canary):
    with zipfile.ZipFile(copy_deepspeed(source), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(10_000_000))


def truncated(source, _canary):
    file = copy_deepspeed(source)
    file.write_bytes(file.read_bytes()[:-200])


def latest_above(source, _canary):
    copy_deepspeed(source)
    (source / "latest").write_text("../../etc")


def empty_folder(source, _canary):
    source.mkdir()


@pytest.mark.parametrize(
    "make",
    [
        pickled_metadata,
        pickled_item,
        path_above,
        pickled_optimizer,
        pickled_model,
        compressed,
        truncated,
        latest_above,
        empty_folder,
    ],
)
def test_harmful_and_damaged_checkpoints_are_refused(tmp_path, in_this_process, make):
    """Nothing is executed, and the message names the file."""
    source = tmp_path / "source"
    make(source, Canary(tmp_path / "executed"))
    with pytest.raises(PlaitError) as error:
        convert.convert(source, str(tmp_path / "out"))
    assert isinstance(error.value, CheckpointError | InputError)
    assert str(source) in str(error.value)
    assert not (tmp_path / "executed").exists() and not (tmp_path / "out" / "LATEST").exists()


def test_elements_across_parts():
    parts = [torch.arange(3.0), torch.arange(3.0, 4.0), torch.arange(4.0, 9.0)]
    for start in range(9):
        for size in range(10 - start):
            elements = content.slice_of_parts(parts, start, size)
            assert elements.tolist() == list(range(start, start + size))
    with pytest.raises(CheckpointError, match="lacks 1 of them"):
        content.slice_of_parts(parts, 4, 6)
