"""Shared fixtures, such as one pool of worker processes per session."""

import gc
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.pool import Pool

# On a shared machine the time that an example takes says nothing about the code.
settings.register_profile("test", deadline=None, max_examples=50)
settings.register_profile("proof", deadline=None, max_examples=200)
torch.set_num_threads(1)  # the machine is shared with the workers
# A background job of a shell ignores Ctrl-C, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONG = frozenset(
    (Path(__file__).parent / "long_cases.txt").read_text(encoding="utf-8").splitlines()
)
"""Cases that only `make proof` runs (tools/long_cases.py)."""


def pytest_configure(config):
    """Choose how many examples property tests draw, unless a test sets a number itself."""
    is_proof = "not proof" not in config.option.markexpr
    settings.load_profile("proof" if is_proof else "test")


# The hook that deselects by mark has to run after the marks are added.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
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
    """Warn of names in long_cases.txt that no case of a collected function has."""
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
    """Run tests outside the checkout and without the user's cache.

    They neither see nor touch `runs/`, measured runs and tokenised text of the user.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))
        patch.setenv("PLAIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_stays():
    """Fail a module that leaves a process group, because later modules would run in it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        raise AssertionError(
            "tests of this module left a process group: close what they load "
            "(ShardedModel.close, engine.close)"
        )


@pytest.fixture(scope="module", autouse=True)
def _late_imports_are_frozen():
    """Freeze the objects of models and compilers that the tests of a module imported."""
    yield
    if len(gc.get_objects()) > 100_000:
        _freeze_objects()


@pytest.fixture
def hang_up_ends():
    """Let SIGHUP end processes, as in a terminal.

    Under `nohup make test` it is ignored, and commands keep ignoring it.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def pool():
    """Pool of gloo workers."""
    workers = Pool()
    yield workers
    workers.close()
