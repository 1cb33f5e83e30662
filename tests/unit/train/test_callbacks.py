"""`run.callbacks`: what is named is found before anything starts, or refused with the rule."""

import pytest

from plait.errors import ConfigError
from plait.train.callbacks import check_callbacks, load_callbacks

MODULE = """
made = []

def heard(event, engine):
    return event

def alone(event):
    pass

class Counter:
    def __init__(self):
        made.append(self)
        self.count = 0

    def __call__(self, event, engine):
        self.count += 1
        return self.count

class Needs:
    def __init__(self, path):
        pass

class Silent:
    pass

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "heard_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")


def test_functions_and_instances():
    """A check makes no instance; a run makes one."""
    import heard_here

    heard_here.made.clear()
    names = ["heard_here:heard", "heard_here:Counter"]
    check_callbacks(names)
    assert not heard_here.made
    heard, counter = load_callbacks(names)
    assert heard("event", None) == "event" and len(heard_here.made) == 1
    assert [counter("event", None) for _ in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("heard_here", "it is not package.module:name"),
        (":heard", "it is not package.module:name"),
        ("nowhere.at_all:heard", "there is no module 'nowhere' here"),
        ("heard_here:other", "heard_here has no 'other'"),
        ("heard_here:number", "it is called with (event, engine)"),
        ("heard_here:alone", "it is called with (event, engine)"),
        ("heard_here:Needs", "the class is created without arguments"),
        ("heard_here:Silent", "an instance is called with (event, engine)"),
    ],
)
def test_what_is_refused(name, rule):
    with pytest.raises(ConfigError) as caught:
        check_callbacks([name])
    assert "run.callbacks" in str(caught.value) and rule in str(caught.value)
