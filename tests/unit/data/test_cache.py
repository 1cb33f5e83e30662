"""A cached folder is built once, also by several processes, and is complete or absent."""

import multiprocessing
import time

import pytest

from plait.data.cache import build_once, digest
from plait.errors import InputError


def test_a_folder_is_built_once(tmp_path):
    calls = []

    def build(folder):
        calls.append(folder)
        (folder / "file").write_text("x")

    for _ in range(2):
        folder = build_once(tmp_path, "kind", "key", build)
        assert folder == tmp_path / "kind" / "key"
        assert (folder / "file").read_text() == "x"
    assert len(calls) == 1


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        build_once(tmp_path, "kind", "key", build)
    assert all(path.suffix == ".lock" for path in (tmp_path / "kind").iterdir())
    # A second attempt is possible.
    assert build_once(tmp_path, "kind", "key", lambda folder: None).is_dir()


def _build_slowly(folder):
    """Runs in two processes."""
    time.sleep(0.3)
    with open(folder.parent / "calls", "a") as calls:
        calls.write("x")


def test_processes_wait_for_the_first(tmp_path):
    context = multiprocessing.get_context("spawn")
    arguments = (tmp_path, "kind", "key", _build_slowly)
    processes = [context.Process(target=build_once, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert (tmp_path / "kind" / "calls").read_text() == "x"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="PLAIT_CACHE"):
        build_once(tmp_path / "file", "kind", "key", lambda folder: None)


def test_boundaries_are_part_of_a_digest():
    assert digest(["ab", "c"]) != digest(["a", "bc"])
    assert digest([b"ab"]) == digest(["ab"])
