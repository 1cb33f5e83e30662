"""Names in `run.callbacks` are found before a run starts, or refused with the rule."""

import pytest

from plait.errors import ConfigError
from plait.train.callbacks import check_callbacks, load_callbacks

MODULE = """
instances = []

def listener(event, engine):
    return event

def one_argument(event):
    pass

class Counter:
    def __init__(self):
        instances.append(self)
        self.count = 0

    def __call__(self, event, engine):
        self.count += 1
        return self.count

class NeedsPath:
    def __init__(self, path):
        pass

class NotCallable:
    pass

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "user_callbacks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")


def test_functions_and_instances():
    """A check creates no instance, and a run creates one."""
    import user_callbacks

    user_callbacks.instances.clear()
    names = ["user_callbacks:listener", "user_callbacks:Counter"]
    check_callbacks(names)
    assert not user_callbacks.instances
    listener, counter = load_callbacks(names)
    assert listener("event", None) == "event" and len(user_callbacks.instances) == 1
    assert [counter("event", None) for _ in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("user_callbacks", "it is not package.module:name"),
        (":listener", "it is not package.module:name"),
        ("nowhere.at_all:listener", "there is no module 'nowhere' here"),
        ("user_callbacks:other", "user_callbacks has no 'other'"),
        ("user_callbacks:number", "it is called with (event, engine)"),
        ("user_callbacks:one_argument", "it is called with (event, engine)"),
        ("user_callbacks:NeedsPath", "the class is created without arguments"),
        ("user_callbacks:NotCallable", "an instance is called with (event, engine)"),
    ],
)
def test_other_names_are_refused(name, rule):
    with pytest.raises(ConfigError) as error:
        check_callbacks([name])
    assert "run.callbacks" in str(error.value) and rule in str(error.value)
