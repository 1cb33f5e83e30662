"""Malicious checkpoints, hashes included: nothing of them is executed, nothing is written next to them, and every command and load ends
with a message and an exit code."""

import hashlib
import json
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.checkpoint.save import snapshot, write
from plait.cli.main import main
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.errors import PlaitError
from plait.hashing import sha256_of


class Canary:
    """Pickled, it creates a folder where it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest") / "run"
    optimizer = {"groups": [], "values": {}}
    counts = {"global_steps": 1, "skipped_steps": 0}
    facts = {**counts, "client_state": {}, "scheduler": None, "optimizer": optimizer}
    tensors = {"model.weight": torch.randn(4, 6), "model.bias": torch.randn(4)}
    parts = {"tensors": tensors, "rank_tensors": {}, "values": {}, "metadata": facts}
    mesh = build_mesh(Layout())
    for tag in ("one", "two"):
        write(snapshot(folder, tag, mesh=mesh, **parts))
    if dist.is_initialized():  # other tests of this process create their own
        dist.destroy_process_group()
    return folder


def rehash(folder):
    """Write the hashes of the files that `two` has now."""
    at = folder / "two"
    manifest = json.loads((at / "manifest.json").read_text())
    ranks = manifest.get("ranks") if isinstance(manifest, dict) else None
    if isinstance(ranks, list) and (at / "00000.json").is_file():
        manifest["ranks"] = [sha256_of((at / "00000.json").read_text()), *ranks[1:]]
        (at / "manifest.json").write_text(json.dumps(manifest))
    digest = sha256_of((at / "manifest.json").read_text())
    (at / "manifest.sha256").write_text(digest)
    (folder / "LATEST").write_text(json.dumps({"tag": "two", "manifest_sha256": digest}))


def edited(file, edit):
    """Return a function that changes a JSON file."""

    def change(folder):
        path = folder / "two" / file
        found = json.loads(path.read_text())
        edit(found)
        path.write_text(json.dumps(found))
        rehash(folder)

    return change


def text(file, content):
    """Return a function that replaces the text of a file."""

    def change(folder):
        (folder / "two" / file).write_text(content)
        if file == "00000.json":
            rehash(folder)
        digest = sha256_of((folder / "two" / "manifest.json").read_text())
        (folder / "two" / "manifest.sha256").write_text(digest)

    return change


def raw(file, content):
    """Return a function that changes the bytes of a file and lists their hashes."""

    def change(folder):
        path, listed = folder / "two" / file, folder / "two" / "00000.json"
        path.write_bytes(content(path.read_bytes()))
        found, data = json.loads(listed.read_text()), path.read_bytes()
        found["shards"]["size"] = len(data)
        first = min(entry["offset"] for entry in found["shards"]["entries"].values())
        found["shards"]["header_sha256"] = hashlib.sha256(data[:first]).hexdigest()
        for entry in found["shards"]["entries"].values():
            end = entry["offset"] + entry["size"]
            entry["sha256"] = hashlib.sha256(data[entry["offset"] : end]).hexdigest()
        listed.write_text(json.dumps(found))
        rehash(folder)

    return change


def header(edit):
    """Return a function that changes the header of the safetensors file, to the same length where it fits."""

    def content(data):
        length = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + length])
        edit(found)
        changed = json.dumps(found, separators=(",", ":")).encode()
        changed = changed.ljust(length) if len(changed) <= length else changed
        return len(changed).to_bytes(8, "little") + changed + data[8 + length :]

    return raw("00000.safetensors", content)


def entry(name, **values):
    return edited("00000.json", lambda found: found["shards"]["entries"][name].update(values))


def tensor(name, **values):
    return edited("00000.json", lambda found: found["tensors"][name].update(values))


def link(name, target):
    def change(folder):
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(target)

    return change


def pipe(folder):
    (folder / "two" / "manifest.json").unlink()
    os.mkfifo(folder / "two" / "manifest.json")


def pickled(name):
    def change(folder):
        (folder / name).write_bytes(pickle.dumps(Canary(folder.parent / "executed")))

    return change


def sparse(name):
    return lambda folder: os.truncate(folder / name, 1 << 40)


DEEP = "[" * 100_000
BOMB = '{"format":2,"tag":"two","metadata":' + '{"a":' * 50_000
BIG = 1 << 60
CASES = {
    "tag above": edited("manifest.json", lambda found: found.update(tag="../../outside")),
    "tag absolute": edited("manifest.json", lambda found: found.update(tag="/etc/passwd")),
    "tag empty": edited("manifest.json", lambda found: found.update(tag="")),
    "file above": edited("00000.json", lambda found: found["shards"].update(file="../../outside")),
    "name above": edited("00000.json", lambda found: found["tensors"].update({"model.../../x": found["tensors"]["model.bias"]})),
    "offset negative": entry("model.bias", offset=-8),
    "offset beyond": entry("model.bias", offset=BIG),
    "size negative": entry("model.bias", size=-1),
    "size beyond": entry("model.bias", size=BIG),
    "offset a float": entry("model.bias", offset=1e400),
    "overlapping": entry("model.bias", offset=200),
    "file size": edited("00000.json", lambda found: found["shards"].update(size=BIG)),
    "shape of a petabyte": tensor("model.weight", shape=[1 << 30, 1 << 20]),
    "shape negative": tensor("model.weight", shape=[-4, -6]),
    "shape of many dimensions": tensor("model.weight", shape=[2] * 10_000),
    "dtype another": tensor("model.weight", dtype="float64"),
    "dtype a function": tensor("model.weight", dtype="load"),
    "dtype dunder": tensor("model.weight", dtype="__class__"),
    "cuts of nothing": tensor("model.weight", cuts=[["tp", 7]]),
    "world of 2^60": edited("manifest.json", lambda found: found["degrees"].update(dp_shard=BIG)),
    "pp of 2^60": edited("manifest.json", lambda found: found["degrees"].update(pp=BIG)),
    "ep of 3": edited("manifest.json", lambda found: found["degrees"].update(ep=3)),
    "ep of 2^60": edited("manifest.json", lambda found: found["degrees"].update(dp_shard=BIG, ep=BIG + 1)),
    "edp of 2": edited("manifest.json", lambda found: found["degrees"].update(edp=2)),
    "cuts of no experts": tensor("model.weight", cuts=[["ep", 0], ["edp", 1]]),
    "ranks none": edited("manifest.json", lambda found: found.update(ranks=[])),
    "sequence 2^200": edited("manifest.json", lambda found: found.update(sequence=1 << 200)),
    "steps a list": edited("manifest.json", lambda found: found["metadata"].update(global_steps=[1] * 100)),
    "metadata none": edited("manifest.json", lambda found: found.update(metadata={})),
    "mark unknown": edited("manifest.json", lambda found: found["metadata"].update(client_state={"$": "eval", "code": "1"})),
    "values a function": edited("00000.json", lambda found: found.update(values={"x._extra_state": {"$": "own", "name": "os.system"}})),
    "keys twice": text("manifest.json", '{"format":2,"format":2,"tag":"a","tag":"../b"}'),
    "nesting": text("manifest.json", DEEP),
    "nesting of metadata": text("manifest.json", BOMB),
    "nesting of a list": text("00000.json", DEEP),
    "NaN": text("manifest.json", '{"format": NaN}'),
    "a number of 100,000 digits": text("manifest.json", '{"format": ' + "9" * 100_000 + "}"),
    "not text": lambda folder: (folder / "two" / "manifest.json").write_bytes(b"\xff\xfe\0"),
    "empty list": text("00000.json", ""),
    "safetensors header of 2^60": raw("00000.safetensors", lambda data: BIG.to_bytes(8, "little") + data[8:]),
    "safetensors header of 0": raw("00000.safetensors", lambda data: bytes(8) + data[8:]),
    "safetensors overlapping": header(lambda found: found["model.bias"].update(data_offsets=found["model.weight"]["data_offsets"])),
    "safetensors shape": header(lambda found: found["model.bias"].update(shape=[BIG])),
    "safetensors dtype": header(lambda found: found["model.bias"].update(dtype="I32")),
    "safetensors name": header(lambda found: found.update(other=found.pop("model.bias"))),
    "pickle as weights": pickled("two/00000.safetensors"),
    "pickle as list": pickled("two/00000.json"),
    "pickle as manifest": pickled("two/manifest.json"),
    "pickle as LATEST": pickled("LATEST"),
    "manifest of a terabyte": sparse("two/manifest.json"),
    "LATEST of a terabyte": sparse("LATEST"),
    "manifest a pipe": pipe,
    "manifest a link": link("two/manifest.json", "/etc/passwd"),
    "manifest without end": link("two/manifest.json", "/dev/zero"),
    "weights without end": link("two/00000.safetensors", "/dev/zero"),
    "checkpoint a link": link("two", "/"),
    "checkpoint a circle": link("two", "two"),
    "leftover a link": link(".two.tmp", "/"),
    "LATEST above": lambda folder: (folder / "LATEST").write_text('{"tag": "../../etc", "manifest_sha256": ""}'),
}  # fmt: skip


COMMANDS = ("ls RUN", "verify RUN", "verify RUN/two", "diff RUN/one RUN/two", "export RUN/two --out OUT", "prune RUN --keep 1")  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_nothing_but_a_message(honest, tmp_path, capsys, case):
    folder = tmp_path / "in" / "run"
    shutil.copytree(honest, folder, symlinks=True)
    (tmp_path / "other").write_text("mine")
    CASES[case](folder)
    before = sorted(path.name for path in tmp_path.rglob("*") if "run" not in path.parts)
    codes = {}
    for command in COMMANDS:
        arguments = command.replace("RUN", str(folder)).replace("OUT", f"{tmp_path}/out").split()
        with pytest.raises(SystemExit) as ended:
            main(arguments if arguments[0] == "export" else ["checkpoint", *arguments])
        code = codes[arguments[0]] = ended.value.code
        message = capsys.readouterr().err
        assert code in (0, 1, 2, 4) and "Traceback" not in message, (command, code, message)
        is_named = message.startswith("plait: ") or command.startswith("ls")
        assert code in (0, 1) or is_named, (command, message)
        if command == "verify RUN" and folder.exists():
            for verify in ("full", "off"):
                with suppress(PlaitError):
                    plait.load_trained(nn.Linear(6, 4), folder, verify=verify)
    assert codes["export"] != 0, "no model is described there"
    assert sorted(path.name for path in tmp_path.rglob("*") if "run" not in path.parts) == before
    assert (tmp_path / "other").read_text() == "mine" and Path("/etc/passwd").exists()
