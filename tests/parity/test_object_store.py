"""Checkpoints in an object store, which has no rename: the manifest is written last and commits.

The store is fsspec's store in memory, and a local server of S3's API where moto and s3fs are
installed (`make object-stores`).
"""

from __future__ import annotations

import os
from contextlib import ExitStack
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
    """Stands for the end of a process."""


def engine_of(world, stage):
    model = build("llama", torch.float32, dropout=False)
    return cases.engine(model, settings(world, 1, stage, 1, 1))


def train(engine, number):
    engine.train_batch([cases.ragged_steps(engine.dp_size, steps=4)[number % 4][engine.dp_rank]])


def content_of(engine):
    return live_content(engine)[0]


def verified_tag(checkpoint):
    """Compare all bytes of a checkpoint with its manifest, and return its tag."""
    verify(checkpoint, lambda done, total: None)
    return str(checkpoint.manifest.tag)


def save_load_and_damage(rank, world):
    """Do everything with a store in memory that one process can. Runs on the only rank."""
    url = f"memory://bucket-{os.getpid()}/run"
    folder = place_of(url)
    engine = engine_of(world, 0)
    assert find_checkpoint(folder) is None
    assert engine.load_checkpoint(url) is None

    contents = []
    for number in range(3):
        train(engine, number)
        contents.append(content_of(engine))
        path = engine.save_checkpoint(url, tag=f"step-{number}", wait=number == 1)
        assert path == folder / f"step-{number}"
        engine.checkpoint_written(wait=True)
    assert [checkpoint.manifest.content for checkpoint in list_complete(folder)] == contents[::-1]
    assert (folder / "step-0").is_dir()
    assert not (folder / "step-0" / "begun").exists()

    # A second save of a tag has a folder of its own, until it has replaced the first.
    train(engine, 3)
    assert engine.save_checkpoint(url, tag="step-2").name == "step-2.2"
    assert verified_tag(find_checkpoint(folder)) == "step-2"
    assert not (folder / "step-2").exists()
    assert engine.save_checkpoint(url, tag="step-2").name == "step-2"
    assert not (folder / "step-2.2").exists()

    other = engine_of(world, 0)
    assert other.load_checkpoint(url) is not None
    assert content_of(other) == content_of(engine)
    assert other.global_steps == 4
    model = cases.build("llama", tied=True, dtype=torch.float32, device="cpu")
    assert plait.load_trained(model, url) == folder / "step-2"
    assert other.load_checkpoint(url, tag="step-0") is not None
    assert content_of(other) == contents[0]

    # If the newest checkpoint is damaged, the previous one is loaded, with a note.
    file = folder / "step-2" / "00000.safetensors"
    data = file.read_bytes()
    file.put(data[:-1] + bytes([data[-1] ^ 1]))
    notes: list[str] = []
    assert other.load_checkpoint(url, on_note=notes.append) == (folder / "step-1", {})
    assert "is damaged" in notes[0]
    file.put(data)

    remove_old(folder, keep=2)
    assert [verified_tag(checkpoint) for checkpoint in list_complete(folder)] == [
        "step-2",
        "step-1",
    ]
    assert not (folder / "step-0").exists()
    listing = CliRunner().invoke(app, ["ls", url])
    assert listing.exit_code == 0, listing.output
    assert contents[1][:12] in listing.output
    command = ["diff", f"{url}/step-1", f"{url}/step-2", "--quick"]
    assert CliRunner().invoke(app, command).exit_code == 1


def test_a_store_in_memory(pool):
    pool.run(1, save_load_and_damage)


def kill_before_each_operation(rank, world, url):
    """End saves before each of their operations on the store. Runs on the only rank.

    Returns:
        The number of operations of a save.
    """
    folder = place_of(url)
    engine = engine_of(world, 0)
    train(engine, 0)
    engine.save_checkpoint(url, tag="one")
    remaining = 0

    def counted(method):
        def operation(self, *args):
            nonlocal remaining
            if not remaining:
                raise Killed
            remaining -= 1
            return method(self, *args)

        return operation

    for count in range(100):
        train(engine, count)
        previous = list_complete(folder)[0].manifest.content
        remaining = count
        try:
            with ExitStack() as stack:
                for name in ("put", "write", "delete"):
                    operation = counted(getattr(StorePath, name))
                    stack.enter_context(patch.object(StorePath, name, operation))
                engine.save_checkpoint(url, tag="one")
        except Killed:
            pass
        else:
            return count

        newest = candidates(folder)[0]
        assert verified_tag(newest) == "one"
        assert newest.manifest.content in (previous, content_of(engine)), count
        assert all(verified_tag(checkpoint) for checkpoint in list_complete(folder))
        assert not [row for row in summarize(folder) if row.problem]
        prune(folder, keep=1)
        assert verified_tag(find_checkpoint(folder)) == "one"
        assert len(list(folder.iterdir())) == 2, (count, list(folder.iterdir()))
    raise AssertionError("a save never ended")


def test_a_killed_save_leaves_a_complete_checkpoint(pool):
    assert pool.run(1, kill_before_each_operation, "memory://killed/run")[0] >= 10


def kill_first_save(rank, world, url):
    """End the first save before it is complete, and save again. Runs on the only rank."""
    engine = engine_of(world, 0)
    with patch("plait.checkpoint.save.write_text", side_effect=Killed), pytest.raises(Killed):
        engine.save_checkpoint(url, tag="one")
    assert list(place_of(url).iterdir())
    assert find_checkpoint(place_of(url)) is None
    assert engine.save_checkpoint(url, tag="one").name == "one.2"


def test_the_first_save_may_be_killed(pool):
    pool.run(1, kill_first_save, "memory://first/run")


def save_without_access(rank, world, url):
    """Return the messages about a store that denies access. Runs on the only rank."""
    engine = engine_of(world, 0)
    engine.save_checkpoint(url, tag="one")
    messages = []
    for operation in ("write", "sizes"):
        denied = patch.object(StorePath, operation, side_effect=OSError(13, "Access Denied", url))
        with denied, pytest.raises(CheckpointError) as error:
            engine.save_checkpoint(url, tag="two")
        messages.append(str(error.value))
        assert verified_tag(find_checkpoint(place_of(url))) == "one"
    return messages


def test_an_error_of_the_store_is_reported(pool):
    for message in pool.run(1, save_without_access, "memory://refused/run")[0]:
        assert "Access Denied" in message


def test_wrong_urls_are_refused():
    with pytest.raises(InputError, match="a URL has two slashes"):
        place_of(Path("s3://bucket/run"))
    with pytest.raises(InputError, match="run.checkpoints = 'nonsense://x'.*"):
        place_of("nonsense://x", "run.checkpoints")
    assert place_of("file:///a/b") == Path("/a/b")
    assert place_of("a/b") == Path("a/b")


@pytest.fixture(scope="module")
def s3():
    """Environment variables of a process that uses a server of S3's API on this machine."""
    reason = "moto or s3fs is not installed; `make object-stores` runs this"
    moto_server = pytest.importorskip("moto.server", reason=reason)
    pytest.importorskip("s3fs", reason=reason)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server.stop()


def save_to_s3(rank, world, url, environment):
    """Return the contents of three saves, the last of a tag that exists. Runs on every rank."""
    os.environ.update(environment)
    if rank == 0:
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
    torch.distributed.barrier()
    engine = engine_of(world, 3)
    contents = []
    for number, tag in enumerate(("one", "two", "two")):
        train(engine, number)
        contents.append(content_of(engine))
        engine.save_checkpoint(url, tag=tag, wait=False)
        # Saves are asynchronous, and must not see this step.
        train(engine, number)
        engine.checkpoint_written(wait=True)
    return contents


def load_from_s3(rank, world, url, folder, environment):
    """Load all tags on another layout, and save to a folder. Runs on the only rank."""
    os.environ.update(environment)
    engine = engine_of(world, 0)
    contents = []
    for tag in ("one", "two", None):
        assert engine.load_checkpoint(url, tag=tag, on_note=lambda note: None) is not None
        contents.append(content_of(engine))
    engine.save_checkpoint(folder, tag="local")
    local = open_checkpoint(place_of(folder))
    remote = open_checkpoint(place_of(url))
    assert not content_difference(local, remote)
    assert not list(differences(local, remote))
    kill_first_save(rank, world, f"{url}-killed")
    return contents


def test_s3(pool, tmp_path, s3, monkeypatch):
    """Two ranks at ZeRO 3 save, one process loads, and the commands list, verify and prune."""
    url = "s3://bucket/run"
    first, _, last = pool.run(2, save_to_s3, url, s3)[0]
    assert pool.run(1, load_from_s3, url, str(tmp_path), s3)[0] == [first, last, last]

    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    assert last[:12] in CliRunner().invoke(app, ["ls", url]).output
    assert CliRunner().invoke(app, ["verify", url]).exit_code == 0
    assert "deleted one" in CliRunner().invoke(app, ["prune", url, "--keep", "1"]).output
    assert [checkpoint.manifest.content for checkpoint in list_complete(place_of(url))] == [last]
