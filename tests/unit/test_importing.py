"""Optional packages that are not installed: what is said, and that it works when it is followed."""

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


def test_what_is_missing_is_named():
    require_extra("here", "hf", json="JSON")
    with pytest.raises(MissingExtraError) as raised:
        require_extra("here", "hf", json="JSON", no_such_package="None Such", no_other="Other")
    assert isinstance(raised.value, InputError) and isinstance(raised.value, ImportError)
    assert (
        str(raised.value)
        == f"here: needs None Such and Other, which are not installed; run {install_line('hf')}"
    )


def test_the_folder_of_the_installation(tmp_path, monkeypatch):
    """It is named where it still exists, and else has to be found by the user."""
    info, source = tmp_path / "plait-0.dist-info", tmp_path / "a clone"
    info.mkdir()
    monkeypatch.setattr(importing, "distribution", lambda _: PathDistribution(info))
    assert install_line("trl") == "pip install '.[trl]' in a clone of Plait"
    (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {}}))
    assert install_line("trl") == "pip install '.[trl]' in a clone of Plait"
    source.mkdir()
    (source / "pyproject.toml").touch()
    assert install_line("trl") == f"pip install '{source}[trl]'"


def test_the_line_works(tmp_path, monkeypatch):
    """pip takes it, and knows the extra; what is missing is not downloaded here."""
    pytest.importorskip("pip")
    pytest.importorskip("hatchling")
    info = tmp_path / "plait-0.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text(json.dumps({"url": ROOT.as_uri()}))
    monkeypatch.setattr(importing, "distribution", lambda _: PathDistribution(info))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert {"hf", "peft", "stores"} <= extras.keys()
    options = "--dry-run --no-deps --no-build-isolation --no-index --disable-pip-version-check --ignore-installed"
    command = [sys.executable, "-m", *shlex.split(install_line("hf")), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Would install plait" in done.stdout
    assert "does not provide the extra" not in done.stdout + done.stderr


def test_the_trainer_without_its_extra():
    """`import plait.hf` is an ImportError that says how to install it."""
    script = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "import plait.importing\n"
        "find = plait.importing.find_spec\n"
        "plait.importing.find_spec = lambda name: None if name == 'transformers' else find(name)\n"
        "try:\n"
        "    import plait.hf\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(
        "plait.hf: needs Hugging Face Transformers, which is not installed; run pip install '"
    )
