"""Checkpoints in an object store, which has no rename: the manifest, written last, commits. Against fsspec's store in memory, and, where
moto and s3fs are installed (`make object-stores`), against a real S3 API on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

import plait
from plait.checkpoint.folder import candidates, find_checkpoint, list_complete, remove_old
from plait.checkpoint.inspect import (
    content_difference,
    differences,
    open_checkpoint,
    prune,
    summarize,
    verify,
)
from plait.checkpoint.places import StorePath, place_of
from plait.cli.checkpoint import app
from plait.errors import CheckpointError, InputError
from tests.parity import cases
from tests.parity.digests import build
from tests.parity.live_content import live_content
from tests.parity.tensor_parallel import settings


class Killed(BaseException):
    """What ends a process here."""


def engine_of(world, stage):
    return cases.engine(
        build("llama", torch.float32, dropout=False), settings(world, 1, stage, 1, 1)
    )


def step(engine, number):
    engine.train_batch([cases.ragged_steps(engine.dp_size, steps=4)[number % 4][engine.dp_rank]])


def good(found):
    """Its tag; every byte of it is what was written."""
    verify(found, lambda done, of: None)
    return str(found.manifest.tag)


def in_memory(rank, world):
    """Everything that one process can see. Runs in a worker."""
    url = f"memory://bucket-{os.getpid()}/run"
    folder, engine = place_of(url), engine_of(world, 0)
    assert find_checkpoint(folder) is None and engine.load_checkpoint(url) is None
    contents = []
    for number in range(3):
        step(engine, number)
        contents.append(live_content(engine)[0])
        assert (
            engine.save_checkpoint(url, tag=f"step-{number}", wait=number == 1)
            == folder / f"step-{number}"
        )
        engine.checkpoint_written(wait=True)
    assert [one.manifest.content for one in list_complete(folder)] == contents[::-1]
    assert (folder / "step-0").is_dir() and not (folder / "step-0" / "begun").exists()
    step(engine, 3)
    again = engine.save_checkpoint(url, tag="step-2")
    assert (
        again.name == "step-2.2"
        and good(find_checkpoint(folder)) == "step-2"
        and not (folder / "step-2").exists()
    )
    assert (
        engine.save_checkpoint(url, tag="step-2").name == "step-2"
        and not (folder / "step-2.2").exists()
    )
    other = engine_of(world, 0)
    loaded = other.load_checkpoint(url)
    assert (
        loaded is not None
        and live_content(other)[0] == live_content(engine)[0]
        and other.global_steps == 4
    )
    assert (
        plait.load_trained(cases.build("llama", tied=True, dtype=torch.float32, device="cpu"), url)
        == folder / "step-2"
    )
    assert (
        other.load_checkpoint(url, tag="step-0") is not None
        and live_content(other)[0] == contents[0]
    )
    # Damage: the newest is passed over, with a note.
    raw = (folder / "step-2" / "00000.safetensors").read_bytes()
    (folder / "step-2" / "00000.safetensors").put(raw[:-1] + bytes([raw[-1] ^ 1]))
    notes: list[str] = []
    assert (
        other.load_checkpoint(url, on_note=notes.append) == (folder / "step-1", {})
        and "is damaged" in notes[0]
    )
    (folder / "step-2" / "00000.safetensors").put(raw)
    remove_old(folder, keep=2)
    assert [good(one) for one in list_complete(folder)] == ["step-2", "step-1"] and not (
        folder / "step-0"
    ).exists()
    listed = CliRunner().invoke(app, ["ls", url])
    assert listed.exit_code == 0 and contents[1][:12] in listed.output, listed.output
    assert (
        CliRunner().invoke(app, ["diff", f"{url}/step-1", f"{url}/step-2", "--quick"]).exit_code
        == 1
    )


def test_a_store_in_memory(pool):
    pool.run(1, in_memory)


def killed_everywhere(rank, world, url):
    """Ends a save before each of its operations on the store: what was there, or the new one, is found complete. Runs in a worker."""
    folder, engine = place_of(url), engine_of(world, 0)
    step(engine, 0)
    engine.save_checkpoint(url, tag="one")
    for first in range(100):
        left = [first]

        def counted(honest, left=left):
            def operation(self, *args):
                if not left[0]:
                    raise Killed
                left[0] -= 1
                return honest(self, *args)

            return operation

        step(engine, first)
        wanted = {"one": list_complete(folder)[0].manifest.content, "new": live_content(engine)[0]}
        try:
            with (
                patch.object(StorePath, "put", counted(StorePath.put)),
                patch.object(StorePath, "write", counted(StorePath.write)),
                patch.object(StorePath, "delete", counted(StorePath.delete)),
            ):
                engine.save_checkpoint(url, tag="one")
        except Killed:
            pass
        else:
            return first
        found = candidates(folder)[0]
        assert good(found) == "one" and found.manifest.content in wanted.values(), first
        assert all(good(one) for one in list_complete(folder)) and not [
            row for row in summarize(folder) if row.problem
        ]
        prune(folder, keep=1)
        assert good(find_checkpoint(folder)) == "one" and len(list(folder.iterdir())) == 2, (
            first,
            list(folder.iterdir()),
        )
    raise AssertionError("a save never ended")


def test_a_killed_save_leaves_nothing_that_counts(pool):
    assert pool.run(1, killed_everywhere, "memory://killed/run")[0] >= 10


def first_one_killed(rank, world, url):
    """Before any checkpoint is complete: the run begins anew, and says nothing of damage. Runs in a worker."""
    engine = engine_of(world, 0)
    with patch("plait.checkpoint.save.write_text", side_effect=Killed), pytest.raises(Killed):
        engine.save_checkpoint(url, tag="one")
    assert list(place_of(url).iterdir()) and find_checkpoint(place_of(url)) is None
    assert engine.save_checkpoint(url, tag="one").name == "one.2"


def test_the_first_save_may_be_killed(pool):
    pool.run(1, first_one_killed, "memory://first/run")


def refused(rank, world, url):
    """What a save and a load say of a store that refuses. Runs in a worker."""
    engine, said = engine_of(world, 0), []
    engine.save_checkpoint(url, tag="one")
    for call in ("write", "sizes"):
        error = OSError(13, "Access Denied", url)
        with (
            patch.object(StorePath, call, side_effect=error),
            pytest.raises(CheckpointError) as caught,
        ):
            engine.save_checkpoint(url, tag="two")
        said.append(str(caught.value))
        assert good(find_checkpoint(place_of(url))) == "one"
    return said


def test_what_a_store_refuses_is_told(pool):
    assert all("Access Denied" in said for said in pool.run(1, refused, "memory://refused/run")[0])


def test_urls_that_are_none():
    with pytest.raises(InputError, match="a URL has two slashes"):
        place_of(Path("s3://bucket/run"))
    with pytest.raises(InputError, match="run.checkpoints = 'nonsense://x'.*"):
        place_of("nonsense://x", "run.checkpoints")
    assert place_of("file:///a/b") == Path("/a/b") and place_of("a/b") == Path("a/b")


@pytest.fixture(scope="module")
def s3():
    """What a process needs in its environment to reach a server of S3's API on this machine."""
    server = pytest.importorskip(
        "moto.server", reason="moto is not installed; `make object-stores` runs this"
    )
    pytest.importorskip("s3fs", reason="s3fs is not installed; `make object-stores` runs this")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    running.stop()


def saves_to(rank, world, url, environment):
    """Contents of three saves, one of them of a tag that is there. Runs in a worker."""
    os.environ.update(environment)
    if rank == 0:
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
    torch.distributed.barrier()
    engine, contents = engine_of(world, 3), []
    for number, tag in enumerate(("one", "two", "two")):
        step(engine, number)
        contents.append(live_content(engine)[0])
        engine.save_checkpoint(url, tag=tag, wait=False)
        step(engine, number)
        engine.checkpoint_written(wait=True)
    return contents


def loads_from(rank, world, url, folder, environment):
    """What one process on another layout finds; the same state in a folder has the same content. Runs in a worker."""
    os.environ.update(environment)
    engine, contents = engine_of(world, 0), []
    for tag in ("one", "two", None):
        loaded = engine.load_checkpoint(url, tag=tag, on_note=lambda _: None)
        assert loaded is not None
        contents.append(live_content(engine)[0])
    engine.save_checkpoint(folder, tag="local")
    here, there = open_checkpoint(place_of(folder)), open_checkpoint(place_of(url))
    assert not content_difference(here, there) and not list(differences(here, there))
    first_one_killed(rank, world, f"{url}-killed")
    return contents


def test_s3(pool, tmp_path, s3, monkeypatch):
    """Two ranks at ZeRO 3 save beside their steps; one process loads it; the commands list, verify and prune."""
    url = "s3://bucket/run"
    saved = pool.run(2, saves_to, url, s3)[0]
    assert pool.run(1, loads_from, url, str(tmp_path), s3)[0] == [saved[0], saved[2], saved[2]]
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    assert saved[2][:12] in CliRunner().invoke(app, ["ls", url]).output
    assert CliRunner().invoke(app, ["verify", url]).exit_code == 0
    assert "deleted one" in CliRunner().invoke(app, ["prune", url, "--keep", "1"]).output
    assert [one.manifest.content for one in list_complete(place_of(url))] == [saved[2]]
