"""Shared fixtures: one pool of workers a session."""

import gc
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.pool import Pool

# Without a deadline, because on a shared machine the clock says nothing about the code.
settings.register_profile("test", deadline=None, max_examples=50)
settings.register_profile("proof", deadline=None, max_examples=200)
torch.set_num_threads(1)  # the machine is shared with the workers
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job ignores Ctrl-C, and so would all that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONG = frozenset(
    (Path(__file__).parent / "long_cases.txt").read_text(encoding="utf-8").splitlines()
)
"""Cases that only `make proof` runs (tools/long_cases.py)."""


def pytest_configure(config):
    """Choose how many examples property tests draw. Those that give a number themselves keep it."""
    is_proof = "not proof" not in config.option.markexpr
    settings.load_profile("proof" if is_proof else "test")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Before those that are not asked for are left out."""
    for item in items:
        if item.nodeid in LONG:
            item.add_marker(pytest.mark.proof)
    _warn_of_unknown_cases(items)


def pytest_collection_finish():
    """Freeze what was imported and collected."""
    _freeze_objects()


def _freeze_objects():
    """Hide all objects that are alive from the garbage collector.

    A session has a million of them, and each `gc.collect()` of the package would visit them all.
    """
    gc.collect()
    gc.freeze()


def _warn_of_unknown_cases(items):
    """Warn of names in long_cases.txt that no case of a collected function has: they leave nothing out."""
    if not items or any("::" in argument for argument in items[0].config.args):
        return
    collected = {item.nodeid for item in items}
    functions = {nodeid.split("[")[0] for nodeid in collected}
    unknown = [case for case in sorted(LONG - collected) if case.split("[")[0] in functions]
    if unknown:
        warnings.warn(
            f"tests/long_cases.txt names cases that do not exist: {', '.join(unknown)}",
            stacklevel=2,
        )


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory):
    """Tests neither see nor touch what a user's runs left here (`runs/`) or at home (measured runs, tokenised text)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))
        patch.setenv("PLAIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_stays():
    """A module that left one would have the modules after it run in it, and fail or pass by their order."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        raise AssertionError(
            "tests of this module left a process group: close what they load (ShardedModel.close, engine.close)"
        )


@pytest.fixture(scope="module", autouse=True)
def _late_imports_are_frozen():
    """Tests import models and compilers, whose objects stay too."""
    yield
    if len(gc.get_objects()) > 100_000:
        _freeze_objects()


@pytest.fixture
def hang_up_ends():
    """As in a terminal: `nohup make test` has SIGHUP ignored, and commands leave it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def pool():
    """Spawned gloo workers."""
    made = Pool()
    yield made
    made.close()
