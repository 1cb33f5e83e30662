"""A missing optional package is named with a command that installs it."""

import json
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from plait import importing
from plait.errors import InputError
from plait.importing import MissingExtraError, install_line, require_extra

ROOT = Path(__file__).parents[2]


def test_missing_packages_are_named():
    require_extra("here", "hf", json="JSON")
    with pytest.raises(MissingExtraError) as raised:
        require_extra("here", "hf", json="JSON", no_such_package="None Such", no_other="Other")
    assert isinstance(raised.value, InputError) and isinstance(raised.value, ImportError)
    message = "here: needs None Such and Other, which are not installed; run "
    assert str(raised.value) == message + install_line("hf")


def test_the_command_has_the_folder_of_the_installation(tmp_path, monkeypatch):
    info = tmp_path / "plait-0.dist-info"
    source = tmp_path / "a clone"
    info.mkdir()
    # Plait as it is installed from a folder.
    monkeypatch.setattr(importing, "distribution", lambda _: PathDistribution(info))
    assert install_line("trl") == "pip install '.[trl]' in a clone of Plait"
    (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {}}))
    assert install_line("trl") == "pip install '.[trl]' in a clone of Plait"
    source.mkdir()
    (source / "pyproject.toml").touch()
    assert install_line("trl") == f"pip install '{source}[trl]'"


def test_pip_accepts_the_command(tmp_path, monkeypatch):
    pytest.importorskip("pip")
    pytest.importorskip("hatchling")
    info = tmp_path / "plait-0.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text(json.dumps({"url": ROOT.as_uri()}))
    monkeypatch.setattr(importing, "distribution", lambda _: PathDistribution(info))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"hf", "peft", "stores"} <= project["optional-dependencies"].keys()
    # Nothing is downloaded or installed.
    options = """
        --dry-run --no-deps --no-build-isolation --no-index --disable-pip-version-check
        --ignore-installed
    """
    command = [sys.executable, "-m", *shlex.split(install_line("hf")), *options.split()]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Would install plait" in process.stdout
    assert "does not provide the extra" not in process.stdout + process.stderr


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
import plait.importing
find = plait.importing.find_spec
plait.importing.find_spec = lambda name: None if name == "transformers" else find(name)
try:
    import plait.hf
except ImportError as error:
    print(error)
"""


def test_the_trainer_without_transformers_is_an_import_error():
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    message = "plait.hf: needs Hugging Face Transformers, which is not installed; run pip install '"
    assert process.stdout.startswith(message)
