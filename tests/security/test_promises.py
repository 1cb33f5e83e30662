"""Each promise of docs/explanation/security.md has a test."""

import io
import json
import os
import socket
import stat
import sys
import zipfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore

import plait
from plait.checkpoint.foreign.unpickle import read_torch
from plait.cli.launching.agent import LOOPBACK, loopback_store
from plait.cli.main import main
from plait.comm import stacks
from plait.errors import CheckpointError, InputError, PlaitError


class WritesAFile(torch.nn.Module):
    """TorchScript of this class writes a file when it is loaded."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self):
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state):
        self.path = state[0]
        self.training = state[1]
        torch.save(torch.ones(1), state[0])

    def forward(self, x):
        return x


@pytest.mark.filterwarnings("ignore")
def test_code_in_a_torchscript_archive_does_not_run(tmp_path):
    """`torch.load` would pass the archive to `torch.jit.load`."""
    canary = tmp_path / "written"
    archive = tmp_path / "model.pt"
    torch.jit.script(WritesAFile(str(canary))).save(str(tmp_path / "compressed.pt"))
    with (
        zipfile.ZipFile(tmp_path / "compressed.pt") as source,
        zipfile.ZipFile(archive, "w") as stored,
    ):
        for name in source.namelist():
            stored.writestr(name, source.read(name))
    torch.jit.load(str(archive))
    assert canary.exists(), "the archive is harmless, so this test shows nothing"
    canary.unlink()
    message = "it has the record .*, which torch.save never writes"
    with pytest.raises(CheckpointError, match=message):
        read_torch(archive)
    assert not canary.exists()


def test_a_torchscript_archive_that_is_renamed_inside_is_refused(tmp_path):
    """Every record is compared with a list, not only the one that marks TorchScript."""
    torch.save({"x": torch.ones(2)}, tmp_path / "good.pt")
    assert torch.equal(read_torch(tmp_path / "good.pt")["x"], torch.ones(2))
    for name in ("constants.pkl", "code/__torch__.py", "data/../../x", "extra/file"):
        path = tmp_path / "changed.pt"
        path.write_bytes((tmp_path / "good.pt").read_bytes())
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(f"good/{name}", b"")
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_torch(path)


def test_stack_files_are_in_a_folder_of_this_user_alone():
    """Other users can neither guess its name nor write into it."""
    folders = [stacks.new_folder() for _ in range(2)]
    try:
        assert folders[0] != folders[1]
        for folder in folders:
            mode = folder.stat()
            assert stat.S_IMODE(mode.st_mode) == 0o700 and mode.st_uid == os.getuid()
    finally:
        for folder in folders:
            folder.rmdir()


def test_the_store_of_one_machine_listens_on_loopback():
    """It has no key, so no other machine may reach it. Processes of this machine can."""
    store = loopback_store(timedelta(seconds=20))
    addresses = listening_addresses(store.port)
    assert addresses == {LOOPBACK}
    client = TCPStore(LOOPBACK, store.port, is_master=False, timeout=timedelta(seconds=20))
    client.set("key", "value")
    assert store.get("key") == b"value"


def listening_addresses(port):
    """Return the addresses on which this machine listens at a port, by the kernel's table."""
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, number = fields[1].split(":")
            if fields[3] != "0A" or int(number, 16) != port:  # 0A is LISTEN
                continue
            # The table has words of four bytes in the byte order of the machine.
            packed = b""
            for start in range(0, len(address), 8):
                packed += int(address[start : start + 8], 16).to_bytes(4, sys.byteorder)
            family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
            addresses.add(socket.inet_ntop(family, packed))
    return addresses


@pytest.mark.parametrize(
    "call", ["plait.from_pretrained", "plait generate --prompt x", "plait verify"]
)
def test_code_in_a_model_folder_does_not_run(tmp_path, call, monkeypatch, capsys):
    """Transformers does not ask either, because a `y` in a pipe would be an answer."""
    folder = tmp_path / "model"
    canary = tmp_path / "ran"
    folder.mkdir()
    code = f"""
open({str(canary)!r}, 'w')
from transformers import PretrainedConfig
class Own(PretrainedConfig):
    model_type = 'own'
"""
    (folder / "own.py").write_text(code)
    classes = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    config = json.dumps({"model_type": "own", "auto_map": classes})
    (folder / "config.json").write_text(config)
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    if call == "plait.from_pretrained":
        with pytest.raises(InputError, match="trust_remote_code"):
            plait.from_pretrained(folder)
    else:
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
        with pytest.raises(SystemExit) as end:
            main([*call.split()[1:], "--model", str(folder)])
        output = capsys.readouterr()
        assert end.value.code and "plait: " in output.err
        assert "[y/N]" not in output.out + output.err
    assert not canary.exists()


def test_messages_are_bounded_and_show_no_control_characters():
    """A name in a file could otherwise rewrite a terminal, or fill a log."""
    text = str(PlaitError("a\x1b[2Jb\0c\nline two\tend é " + "x" * 4_000_000))
    assert "\x1b" not in text and "\0" not in text and "a\\x1b[2Jb\\x00c\nline two\tend é" in text
    assert len(text) < 11_000 and "4,000,0" in text
