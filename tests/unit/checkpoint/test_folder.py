"""A load takes the checkpoint that LATEST names, or else the newest good one, and says so."""

import errno
import shutil
from pathlib import Path

import pytest

from plait.checkpoint.folder import candidates, find_checkpoint, list_complete, remove_old
from plait.checkpoint.inspect import prune, summarize
from plait.errors import CheckpointError
from plait.train.run_folder import RunFolder
from tests.checkpoints import put


def tags(folder, tag=None):
    return [checkpoint.manifest.tag for checkpoint in candidates(folder, tag)]


def marked(folder):
    """Return the tags that `plait checkpoint ls` marks."""
    return [row.tag for row in summarize(folder) if row.latest]


@pytest.fixture
def three(tmp_path):
    for sequence, tag in enumerate(("a", "b", "c"), 1):
        put(tmp_path, tag, {}, sequence=sequence)
    return tmp_path


def test_a_folder_without_checkpoints(tmp_path):
    assert find_checkpoint(tmp_path) is None and find_checkpoint(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match="holds none"):
        find_checkpoint(tmp_path, "a")


def test_the_newest_comes_first(three):
    assert tags(three) == ["c", "b", "a"]
    assert tags(three, "a") == ["a"]
    with pytest.raises(CheckpointError, match="holds c, b, a"):
        candidates(three, "d")


def test_a_latest_file_that_a_user_has_restored(three):
    """A user returns to an older checkpoint. Newer ones are not loaded."""
    put(three, "d", {}, sequence=4)
    older = (three / "LATEST").read_text()
    put(three, "e", {}, sequence=5)
    (three / "LATEST").write_text(older)
    assert tags(three) == ["d", "c", "b", "a"]
    note = candidates(three)[0].notes[0]
    assert "names d, which is loaded, although e is newer and complete" in note
    assert marked(three) == ["d"]


@pytest.mark.parametrize("damage", ["missing", "empty", "no JSON", "another tag", "another hash"])
def test_a_damaged_latest_file_is_reported(three, damage):
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
    newest = candidates(three)[0]
    assert newest.manifest.tag == "c"
    assert newest.notes and "loaded" in newest.notes[0]
    assert marked(three) == ["c"]


def test_a_damaged_newest_checkpoint_is_reported(three):
    manifest = three / "c" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"sequence":3', '"sequence":9'))
    assert tags(three) == ["b", "a"] and "damaged" in candidates(three)[0].notes[0]
    assert marked(three) == ["b"]
    with pytest.raises(CheckpointError, match="was changed after it was written: its sha256 is"):
        candidates(three, "c")
    manifest.unlink()
    assert tags(three) == ["b", "a"] and "incomplete" in candidates(three)[0].notes[0]


def test_a_folder_whose_only_checkpoint_is_damaged(tmp_path):
    put(tmp_path, "a", {})
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no other one is complete; restore one"):
        find_checkpoint(tmp_path)
    (tmp_path / "LATEST").write_text("")
    with pytest.raises(CheckpointError, match="no checkpoint there is complete"):
        find_checkpoint(tmp_path)


def test_damaged_checkpoints_without_latest_are_not_ignored(tmp_path):
    """A run would start at the beginning."""
    path = put(tmp_path, "a", {}, named=False)
    (path / "manifest.json").unlink()
    (path / "manifest.sha256").unlink()
    message = "LATEST is missing, and no checkpoint there is complete; a cannot be read"
    for name in ("manifest.json", "manifest.sha256", "00000.json", "00000.safetensors"):
        (path / name).write_text("x")
        with pytest.raises(CheckpointError, match=message):
            find_checkpoint(tmp_path)
        (path / name).unlink()


def test_a_save_that_ended_between_its_two_renames(three):
    """The old checkpoint counts until the new one has its name."""
    (three / "c").rename(three / ".c.replaced")
    put(three, ".c.tmp", {}, sequence=4, named=False)
    assert tags(three) == ["c", "b", "a"] and not candidates(three)[0].notes
    put(three, "c", {}, sequence=4)
    assert tags(three) == ["c", "b", "a"] and candidates(three)[0].manifest.sequence == 4


def test_the_checkpoint_that_latest_names_is_not_deleted(three):
    put(three, "d", {}, sequence=4, named=False)
    put(three, "e", {}, sequence=5, named=False)
    (three / ".a.deleted").mkdir()
    remove_old(three, keep=2)
    assert [checkpoint.manifest.tag for checkpoint in list_complete(three)] == ["e", "d", "c"]
    assert not list(three.glob(".*"))


def test_leftovers_of_a_killed_process_are_deleted(three):
    """Links are deleted, and not the folders to which they point."""
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


def test_copies_and_notes_of_a_user_are_kept(three):
    shutil.copytree(three / "a", three / "best-model-do-not-delete")
    shutil.copytree(three / "c", three / "c-copy")
    (three / "b" / "notes.txt").write_text("the good one")
    put(three, "d", {}, sequence=4)
    remove_old(three, keep=1)
    folders = {path.name for path in three.iterdir() if path.is_dir()}
    assert folders == {"best-model-do-not-delete", "c-copy", "b", "d"}
    assert tags(three)[0] == "d"


def test_a_folder_that_may_not_be_opened_is_ignored(three, monkeypatch):
    """`lost+found` at the root of a disk belongs to another user."""
    (three / "lost+found").mkdir()
    exists = Path.exists

    # Tests may run as root, who may open every folder.
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


def test_pruning_refuses_the_folder_of_an_active_run(three):
    """A run holds its lock in the folder above its checkpoints."""
    folder = three.parent / "run" / "checkpoints"
    folder.parent.mkdir()
    three.rename(folder)
    lock = RunFolder(folder.parent).claim()
    with pytest.raises(CheckpointError, match="plait train is running in"):
        prune(folder, keep=1)
    lock.close()
    assert prune(folder, keep=1) == ["a", "b"]
