"""Exporting: what cannot be written is a sentence, and nothing half-written stays."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest import mock

import pytest
from safetensors import SafetensorError
from torch import nn

from plait.checkpoint.windows import TensorRecord
from plait.errors import InputError
from plait.train import export as export_module


@pytest.mark.parametrize(
    "error", [SafetensorError("Error while serializing: No space left on device"), OSError(errno.ENOSPC, "No space left on device", "x")]
)
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model = nn.Linear(2, 2, bias=False)
    reader = mock.Mock(under=lambda start: [("weight", TensorRecord(dtype="float32", shape=(2, 2)))])
    monkeypatch.setattr(export_module, "require_transformers", mock.Mock())
    monkeypatch.setattr(export_module, "Reader", lambda found: reader)
    monkeypatch.setattr(export_module, "described_model", lambda found: model)
    monkeypatch.setattr(export_module, "save_file", mock.Mock(side_effect=error))
    with pytest.raises(InputError, match=r"--out .*out cannot be written: .*No space left on device"):
        export_module.export(mock.Mock(), tmp_path / "out")
    assert not list(tmp_path.iterdir())
