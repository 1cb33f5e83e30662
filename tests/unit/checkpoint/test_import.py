"""Checkpoints of DeepSpeed (made by tools/deepspeed_fixtures.py) and of torch: what they hold, on Plait's side; and nothing is executed."""

import contextlib
import copy
import io
import os
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

MADE = Path(__file__).parent / "deepspeed"


@pytest.fixture(autouse=True)
def no_group_is_left():
    """Other tests of this process make their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Canary:
    """Pickled, it creates a folder where it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


class Model(nn.Module):
    """That of tools/deepspeed_fixtures.py: two groups, a frozen weight, a buffer."""

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
    """The same three steps in plain torch."""
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


def run_in_this_process(command, **_):
    """Stand in for `subprocess.run`, without the seconds that a process takes to start. One test starts the process."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        convert.main(*command[3:])
    return SimpleNamespace(stdout=said.getvalue(), stderr="", returncode=0)


def in_this_process(source, out, monkeypatch):
    monkeypatch.setattr(convert.subprocess, "run", run_in_this_process)
    return convert.convert(source, str(out))


def compare(out, *, rtol):
    """Compare a converted checkpoint with what plain torch computes."""
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
    decays = {
        tuple(group["params"]): exact.decode(group["now"]["weight_decay"])
        for group in checkpoint.manifest.metadata["optimizer"]["groups"]
    }
    assert decays == {("first.bias",): 0.0, ("first.weight", "last.weight"): 0.1}
    other = Model()
    plait.load_trained(other, out)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=rtol, atol=1e-7)
    return reader


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(tmp_path, monkeypatch, stage):
    done = in_this_process(MADE / f"zero{stage}", tmp_path / "out", monkeypatch)
    assert f"ZeRO {stage}, 2 ranks" in done.kind
    assert (done.steps, done.tensors, done.states) == (3, 5, 9)
    facts = compare(tmp_path / "out", rtol=1e-5).manifest.metadata
    assert exact.decode(facts["client_state"]) == {"epoch": 2, "name": "x"}
    assert facts["global_steps"] == 3
    assert any("generators" in what for what in done.left_out)


def test_the_command_line(tmp_path):
    """The command starts the process that reads."""
    arguments = [str(MADE / "zero3"), "--out", str(tmp_path / "out"), "--tag", "theirs"]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    assert "step 3, 5 tensors and 9 states" in run.output
    assert "not converted: generators" in run.output
    assert compare(tmp_path / "out", rtol=1e-5).path == tmp_path / "out" / "theirs"


ADVICE = """
    import gone --out a -> name one that DeepSpeed or torch.distributed.checkpoint wrote -> import zero1 --out a
    import zero1 --out zero1-plait -> name a new folder -> import zero1 --out b
    checkpoint ls gone -> name one that holds checkpoints -> checkpoint ls zero1-plait
    checkpoint verify gone -> name a checkpoint, or a folder of checkpoints -> checkpoint verify zero1-plait | checkpoint verify zero1-plait/step-00000003
"""  # fmt: skip


def test_advice(tmp_path, monkeypatch, capsys):
    """A script that finds a checkpoint of DeepSpeed gets the command that converts it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convert.subprocess, "run", run_in_this_process)
    shutil.copytree(MADE / "zero1", "zero1")
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


def test_a_bad_file_on_the_command_line(tmp_path, monkeypatch):
    """A file that names what is not read ends with a message and the exit code of a bad checkpoint."""
    shutil.copytree(MADE / "zero1", tmp_path / "bad")
    file = next((tmp_path / "bad").rglob("*rank_0*optim*"))
    torch.save({"optimizer_state_dict": Canary(tmp_path / "executed")}, file)
    monkeypatch.setattr(convert.subprocess, "run", run_in_this_process)
    run = CliRunner().invoke(app, [str(tmp_path / "bad"), "--out", str(tmp_path / "other")])
    assert isinstance(run.exception, CheckpointError) and run.exception.exit_code == 4
    assert "posix.mkdir" in str(run.exception)
    assert not (tmp_path / "executed").exists() and not (tmp_path / "other").exists()


def save_in_torchs_format(folder):
    weights, states = get_state_dict(*trained())
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder, no_dist=True)


def test_torch_distributed_checkpoint(tmp_path, monkeypatch):
    save_in_torchs_format(tmp_path / "dcp")
    in_this_process(tmp_path / "dcp", tmp_path / "out", monkeypatch)
    compare(tmp_path / "out", rtol=0)


def as_python_3_11_0(member, _protocol):
    """How Python 3.11.0 to 3.11.3 pickle a member of an enum."""
    return getattr, (type(member), member.name)


class ZeroStageEnum(IntEnum):
    """DeepSpeed's enum under its own name, see `test_enums_of_python_3_11_0`."""

    gradients = 2


class Attribute:
    """Pickled, it is a call of `getattr` with these arguments."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_enums_of_python_3_11_0(tmp_path, monkeypatch):
    """Enums arrive as `getattr(EnumClass, "MEMBER")` in what Debian 12's Python 3.11.2 wrote."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", as_python_3_11_0)
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", as_python_3_11_0)
    monkeypatch.setattr(ZeroStageEnum, "__module__", "deepspeed.runtime.zero.config")
    module = "deepspeed.runtime.zero.config"
    for end in range(1, 5):
        name = ".".join(module.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, sys.modules[__name__])
    torch.save({"zero_stage": ZeroStageEnum.gradients}, tmp_path / "states.pt")
    assert read_torch(tmp_path / "states.pt")["zero_stage"].args == (2,)

    save_in_torchs_format(tmp_path / "dcp")
    assert b"getattr" in (tmp_path / "dcp" / ".metadata").read_bytes()
    in_this_process(tmp_path / "dcp", tmp_path / "out", monkeypatch)
    compare(tmp_path / "out", rtol=0)


def test_any_other_getattr_is_refused(tmp_path):
    """Only the listed members of the listed enums are read, in every protocol."""
    hostile = [
        Attribute(_MEM_FORMAT_ENCODING, "__class__"),
        Attribute(_MEM_FORMAT_ENCODING, "mro"),
        Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST", None),
        Attribute(MetadataIndex, "__init__"),
        Attribute(torch.Tensor, "__reduce_ex__"),
        Attribute(Attribute(str, "format"), "__self__"),
        Attribute({}, "__class__"),
        Attribute("text", "format"),
        Attribute([], "TORCH_CHANNELS_LAST"),
    ]
    for entry in hostile:
        for protocol in (0, 2, 4, 5):
            (tmp_path / "plain").write_bytes(pickle.dumps(entry, protocol))
            with pytest.raises(CheckpointError, match="cannot be read"):
                read_pickle(tmp_path / "plain")
        torch.save(entry, tmp_path / "torch")
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_torch(tmp_path / "torch")
    (tmp_path / "plain").write_bytes(pickle.dumps(getattr))
    assert read_pickle(tmp_path / "plain") is not getattr


KINDS = ("metadata", "item", "optimizer states", "model states", "compressed", "latest above", "path above", "cut", "none")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_made_to_do_harm(tmp_path, monkeypatch, kind):
    """Nothing is executed, and a message names the file."""
    source, canary = tmp_path / "source", tmp_path / "executed"
    if kind in ("metadata", "item", "path above"):
        dcp.save({"model": {"x": torch.ones(3)}, "y": "text"}, checkpoint_id=source, no_dist=True)
        if kind == "metadata":
            (source / ".metadata").write_bytes(pickle.dumps(Canary(canary)))
        else:
            metadata = pickle.loads((source / ".metadata").read_bytes())
            for index, info in metadata.storage_data.items():
                if kind == "path above":
                    info.relative_path = "../other"
                elif index.fqn == "model.x":
                    own = source / "own.pt"
                    torch.save(Canary(canary), own)
                    info.relative_path, info.offset, info.length = own.name, 0, own.stat().st_size
            (source / ".metadata").write_bytes(pickle.dumps(metadata))
    elif kind == "none":
        source.mkdir()
    else:
        shutil.copytree(MADE / "zero2", source)
        name = "*rank_1*optim*" if kind != "model states" else "*model_states*"
        path = next((source / "step3").glob(name))
        if kind in ("optimizer states", "model states"):
            torch.save({"optimizer_state_dict": Canary(canary)}, path)
        elif kind == "latest above":
            (source / "latest").write_text("../../etc")
        elif kind == "compressed":
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("x/data.pkl", bytes(10_000_000))
        else:
            path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(PlaitError) as caught:
        in_this_process(source, tmp_path / "out", monkeypatch)
    assert isinstance(caught.value, CheckpointError | InputError)
    assert str(source) in str(caught.value)
    assert not canary.exists() and not (tmp_path / "out" / "LATEST").exists()


def test_elements_across_parts():
    parts = [torch.arange(3.0), torch.arange(3.0, 4.0), torch.arange(4.0, 9.0)]
    for a in range(9):
        for b in range(10 - a):
            assert content.slice_of_parts(parts, a, b).tolist() == list(range(a, a + b))
    with pytest.raises(CheckpointError, match="lacks 1 of them"):
        content.slice_of_parts(parts, 4, 6)
