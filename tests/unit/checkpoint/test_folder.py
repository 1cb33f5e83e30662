"""Which checkpoint to go on from: the one that LATEST names, else the newest that is good, never none in silence."""

import errno
import shutil
from pathlib import Path

import pytest

from plait.checkpoint.folder import candidates, find_checkpoint, list_complete, remove_old
from plait.checkpoint.inspect import prune
from plait.errors import CheckpointError
from plait.train.run_folder import RunFolder
from tests.checkpoints import put


def tags(folder, tag=None):
    return [one.manifest.tag for one in candidates(folder, tag)]


@pytest.fixture
def three(tmp_path):
    for sequence, tag in enumerate(("a", "b", "c"), 1):
        put(tmp_path, tag, {}, sequence=sequence)
    return tmp_path


def test_nothing(tmp_path):
    assert find_checkpoint(tmp_path) is None and find_checkpoint(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match="holds none"):
        find_checkpoint(tmp_path, "a")


def test_the_newest_and_then_older_ones(three):
    assert tags(three) == ["c", "b", "a"]
    assert tags(three, "a") == ["a"]
    with pytest.raises(CheckpointError, match="holds c, b, a"):
        candidates(three, "d")


def test_latest_that_was_put_back_by_hand(three):
    """A user returns to an older checkpoint. Later ones are not loaded."""
    put(three, "d", {}, sequence=4)
    older = (three / "LATEST").read_text()
    put(three, "e", {}, sequence=5)
    (three / "LATEST").write_text(older)
    assert tags(three) == ["d", "c", "b", "a"]
    note = candidates(three)[0].notes[0]
    assert "names d, which is loaded, although e is newer and complete" in note


@pytest.mark.parametrize("damage", ["gone", "empty", "no JSON", "another tag", "another hash"])
def test_a_bad_latest(three, damage):
    latest = three / "LATEST"
    text = latest.read_text()
    latest.unlink()
    contents = {
        "empty": "",
        "no JSON": "{",
        "another tag": text.replace('"c"', '"x"'),
        "another hash": text.replace(text[-6], "g"),
    }
    if damage in contents:
        latest.write_text(contents[damage])
    found = candidates(three)
    assert found[0].manifest.tag == "c"
    assert found[0].notes and "loaded" in found[0].notes[0]


def test_a_bad_newest(three):
    manifest = three / "c" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"sequence":3', '"sequence":9'))
    assert tags(three) == ["b", "a"] and "damaged" in candidates(three)[0].notes[0]
    with pytest.raises(CheckpointError, match="was changed after it was written: its sha256 is"):
        candidates(three, "c")
    manifest.unlink()
    assert tags(three) == ["b", "a"] and "incomplete" in candidates(three)[0].notes[0]


def test_where_nothing_is_left(tmp_path):
    put(tmp_path, "a", {})
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no other one is complete; restore one"):
        find_checkpoint(tmp_path)
    (tmp_path / "LATEST").write_text("")
    with pytest.raises(CheckpointError, match="no checkpoint there is complete"):
        find_checkpoint(tmp_path)


def test_one_that_was_being_replaced(three):
    """The process died between the two renames. The old one counts until the new one is in place."""
    (three / "c").rename(three / ".c.replaced")
    put(three, ".c.tmp", {}, sequence=4, named=False)
    assert tags(three) == ["c", "b", "a"] and not candidates(three)[0].notes
    put(three, "c", {}, sequence=4)
    assert tags(three) == ["c", "b", "a"] and candidates(three)[0].manifest.sequence == 4


def test_old_ones_are_deleted_but_not_the_one_to_go_on_from(three):
    put(three, "d", {}, sequence=4, named=False)
    put(three, "e", {}, sequence=5, named=False)
    (three / ".a.deleted").mkdir()
    remove_old(three, keep=2)
    assert [one.manifest.tag for one in list_complete(three)] == ["e", "d", "c"]
    assert not list(three.glob(".*"))


def test_damaged_ones_without_latest_are_not_a_new_beginning(tmp_path):
    path = put(tmp_path, "a", {}, named=False)
    (path / "manifest.json").unlink()
    (path / "manifest.sha256").unlink()
    words = "LATEST is missing, and no checkpoint there is complete; a cannot be read"
    for name in ("manifest.json", "manifest.sha256", "00000.json", "00000.safetensors"):
        (path / name).write_text("x")
        with pytest.raises(CheckpointError, match=words):
            find_checkpoint(tmp_path)
        (path / name).unlink()


def test_files_and_links_that_a_kill_left_are_deleted_too(three):
    (three / ".LATEST.7.tmp").write_text("")
    (three / ".x.tmp").symlink_to(three / "c", target_is_directory=True)
    (three / "elsewhere").mkdir()
    (three / "a").rename(three / "elsewhere" / "a")
    (three / "a").symlink_to(three / "elsewhere" / "a", target_is_directory=True)
    assert prune(three, keep=2) == [".LATEST.7.tmp", ".x.tmp", "a"]
    assert tags(three) == ["c", "b"] and (three / "elsewhere" / "a").exists()
    assert not list(three.glob(".*"))


def test_pruning_keeps_one_whose_successor_is_incomplete(three):
    (three / "c").rename(three / ".c.replaced")
    (three / "c").mkdir()
    (three / "c" / "00000.safetensors").write_text("")
    assert tags(three) == ["c", "b", "a"]
    assert prune(three, keep=1) == ["a"]
    assert tags(three) == ["c", "b"]


def test_the_users_copies_and_notes_are_kept(three):
    """These are a copy under another name, a copy of the newest, and a checkpoint with a file of the user's."""
    shutil.copytree(three / "a", three / "best-model-do-not-delete")
    shutil.copytree(three / "c", three / "c-copy")
    (three / "b" / "notes.txt").write_text("the good one")
    put(three, "d", {}, sequence=4)
    remove_old(three, keep=1)
    folders = {path.name for path in three.iterdir() if path.is_dir()}
    assert folders == {"best-model-do-not-delete", "c-copy", "b", "d"}
    assert tags(three)[0] == "d"


def test_a_folder_that_may_not_be_opened_is_passed_over(three, monkeypatch):
    """`lost+found` at the root of a disk belongs to another user."""
    (three / "lost+found").mkdir()
    exists = Path.exists

    def refuse(path, **settings):
        if path.parent.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path, **settings)

    monkeypatch.setattr(Path, "exists", refuse)
    assert tags(three) == ["c", "b", "a"]
    remove_old(three, keep=2)
    assert tags(three) == ["c", "b"]
    (three / "LATEST").unlink()
    assert tags(three) == ["c", "b"]


def test_pruning_waits_for_the_end_of_a_run(three):
    """A run holds its lock in the folder above its checkpoints."""
    folder = three.parent / "run" / "checkpoints"
    folder.parent.mkdir()
    three.rename(folder)
    stream = RunFolder(folder.parent).claim()
    with pytest.raises(CheckpointError, match="plait train is running in"):
        prune(folder, keep=1)
    stream.close()
    assert prune(folder, keep=1) == ["a", "b"]
