"""Hostfiles, and the machines and slots that include and exclude select from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster.machines import HostfileEntry, parse_hostfile, read_hostfile, select_hosts
from plait.errors import ConfigError, InputError
from tests.table import check_rows

HOSTS = parse_hostfile("a slots=4\nb slots=2\nc slots=1")
names = st.from_regex(r"[a-z][a-z0-9.-]{0,10}", fullmatch=True)


def test_comments_blank_lines_and_order():
    text = "# head\n\nworker-2.local slots=2  # second\n10.0.0.1   slots = 1\n"
    assert parse_hostfile(text) == (
        HostfileEntry("worker-2.local", (0, 1)),
        HostfileEntry("10.0.0.1", (0,)),
    )


@given(
    st.dictionaries(names, st.integers(1, 16), min_size=1, max_size=5),
    st.sampled_from(["", " # x"]),
)
def test_any_hostfile(slots, comment):
    text = "\n".join(f"{name} slots={count}{comment}" for name, count in slots.items())
    hosts = parse_hostfile(text)
    assert [host.name for host in hosts] == list(slots)
    for host in hosts:
        assert host.slots == tuple(range(slots[host.name]))


WRONG_LINES = {
    "a slots=2\na slots=2": "hostfile:2 = 'a slots=2': a is named twice",
    "a": "hostfile:1 = 'a': not `name slots=N`",
    "a slot=2": "hostfile:1",
    "a slots=0": "N from 1 to 65536",
    "-F/tmp/x slots=2": "hostfile:1",
    f"a slots={'9' * 5000}": "N from 1 to 65536",
    "a slots=2 b slots=2": "hostfile:1",
    "# nothing": "names no machine",
}


def check_wrong_line(row):
    text, message = row
    with pytest.raises(ConfigError) as error:
        parse_hostfile(text)
    assert message in str(error.value)


def test_wrong_lines_are_refused():
    check_rows({row[0][:20]: row for row in WRONG_LINES.items()}, check_wrong_line)


def test_every_wrong_line_is_reported():
    with pytest.raises(ConfigError) as error:
        parse_hostfile("a\nb slots=1\nb slots=1\nc slots=x")
    fields = [problem.field for problem in error.value.problems]
    assert fields == ["hostfile:1", "hostfile:3", "hostfile:4"]


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_hostfile(tmp_path / "hosts")


def test_filters_keep_the_order_of_the_file():
    for include, exclude, expected in (
        ("", "", {"a": (0, 1, 2, 3), "b": (0, 1), "c": (0,)}),
        ("b@a:1,3", "", {"a": (1, 3), "b": (0, 1)}),
        ("a:3,1,3", "", {"a": (1, 3)}),
        ("a:0@a:2", "", {"a": (0, 2)}),
        ("", "b", {"a": (0, 1, 2, 3), "c": (0,)}),
        ("", "a:0,1@c:0", {"a": (2, 3), "b": (0, 1)}),
    ):
        hosts = select_hosts(HOSTS, include=include, exclude=exclude)
        assert {host.name: host.slots for host in hosts} == expected, (include, exclude)


def test_wrong_filters_are_refused():
    for include, exclude, message in (
        ("a", "b", "given together with --include"),
        ("d", "", "'d' is not in the hostfile; use a, b, c"),
        ("", "a:4", "a has slots 0 to 3, not 4"),
        ("a:", "", "not slot numbers"),
        ("a:x", "", "not slot numbers"),
        ("", "a@b@c", "leaves no machine"),
    ):
        with pytest.raises(ConfigError, match=message):
            select_hosts(HOSTS, include=include, exclude=exclude)


@given(st.sets(st.integers(0, 3), min_size=1, max_size=3))
def test_exclude_is_the_complement_of_include(slots):
    text = f"a:{','.join(map(str, slots))}"
    included = select_hosts(HOSTS, include=text)[0].slots
    excluded = select_hosts(HOSTS, exclude=text)[0].slots
    assert sorted(included + excluded) == [0, 1, 2, 3]
    assert set(included) == slots


def test_a_user_and_a_byte_order_mark(tmp_path):
    """DeepSpeed accepts both. In a filter `@` also separates machines."""
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfroot@a slots=2\nb slots=2\n")
    hosts = read_hostfile(tmp_path / "hosts")
    assert [(host.name, host.address) for host in hosts] == [("root@a", "a"), ("b", "b")]
    assert select_hosts(hosts, include="a:1@b") == (
        HostfileEntry("root@a", (1,)),
        HostfileEntry("b", (0, 1)),
    )
    assert select_hosts(hosts, include="root@a") == (HostfileEntry("root@a", (0, 1)),)
    assert select_hosts(hosts, exclude="a") == (HostfileEntry("b", (0, 1)),)
