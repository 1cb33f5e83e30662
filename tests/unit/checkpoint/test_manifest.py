"""A manifest that was edited with its hashes is refused, and the message names the file."""

import json

import pytest

from plait.checkpoint.format import RankManifest, read_json, read_manifest
from plait.errors import CheckpointError
from plait.hashing import sha256_of
from tests.checkpoints import put


def test_impossible_degrees_are_refused(tmp_path):
    path = put(tmp_path, "a", {})
    for degrees in ({"tp": 0}, {"xx": 2}, {"pp": -1}, {"pp": "many"}, []):
        edited = json.dumps(json.loads((path / "manifest.json").read_text()) | {"degrees": degrees})
        (path / "manifest.json").write_text(edited)
        (path / "manifest.sha256").write_text(sha256_of(edited))
        message = r"manifest.json is not a valid Manifest of Plait: degrees"
        with pytest.raises(CheckpointError, match=message):
            read_manifest(path)


def test_impossible_records_of_tensors_are_refused(tmp_path):
    shards = {"file": "../x", "size": 0, "header_sha256": "", "entries": {}}
    for change in (
        {"shape": [-1]},
        {"cuts": [["xx", 0]]},
        {"cuts": [["tp", 2]]},
        {"cuts": [["tp", -1]]},
        {"stages": []},
        {"stages": [-1]},
    ):
        record = {"dtype": "float32", "shape": [2, 3], "cuts": [], "stages": [0], **change}
        text = json.dumps({"shards": shards, "tensors": {"x": record}})
        (tmp_path / "00000.json").write_text(text)
        message = r"00000.json is not a valid RankManifest of Plait: tensors.x"
        with pytest.raises(CheckpointError, match=message):
            read_json(RankManifest, tmp_path / "00000.json")
