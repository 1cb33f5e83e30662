"""DeepSpeed's hostfile: one `name slots=N` a line, and its include and exclude filters.

Pure text in, nodes out; nothing is looked up on the network. A slot is one device of the machine,
numbered from 0. The order of the file is the order of the ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from plait.errors import ConfigError, InputError, Problem, refuse

MOST_SLOTS = 2**16
"""Of a machine."""
_LINE = re.compile(r"(?P<name>[^\s#=-][^\s#=]*)\s+slots\s*=\s*(?P<slots>\d{1,9})")


@dataclass(frozen=True)
class Host:
    """One machine and the slots of it that are used."""

    name: str
    """The name that ssh is given: `node1`, or `user@node1`."""
    slots: tuple[int, ...]

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def read(path: str | Path) -> tuple[Host, ...]:
    """The hosts of a hostfile. Raises InputError for a file that cannot be read and ConfigError for
    its content.
    """
    try:
        # editors of Windows begin a file with a byte order mark
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"hostfile {path}: {getattr(error, 'strerror', None) or error}; name a readable file"
        ) from None
    return parse(text, source=str(path))


def parse(text: str, *, source: str = "hostfile") -> tuple[Host, ...]:
    """The hosts in `text`; `#` begins a comment. Raises ConfigError naming every line that is
    wrong, hosts named twice included.

    >>> parse("a slots=2\\nb slots=1  # the small one")
    (Host(name='a', slots=(0, 1)), Host(name='b', slots=(0,)))
    """
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None or not 1 <= int(match["slots"]) <= MOST_SLOTS:
            rule = f"not `name slots=N` with N from 1 to {MOST_SLOTS}"
            problems.append(
                Problem(f"{source}:{number}", content, rule, "write for example `node1 slots=8`")
            )
        elif match["name"] in hosts:
            problems.append(
                Problem(
                    f"{source}:{number}",
                    content,
                    f"{match['name']} is named twice",
                    "give each machine one line with all its slots",
                )
            )
        else:
            hosts[match["name"]] = Host(match["name"], tuple(range(int(match["slots"]))))
    if not hosts and not problems:
        problems.append(
            Problem(source, None, "names no machine", "write one `name slots=N` a line")
        )
    refuse(problems)
    return tuple(hosts.values())


def select(hosts: tuple[Host, ...], *, include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Keep or drop machines and slots, in DeepSpeed's notation: `name` for a machine, `name:0,2`
    for some of its slots, `@` between.

    With `include` only what it names is used; with `exclude` all but that. Raises ConfigError when
    both are given, for a machine or slot that the hostfile does not have, and when nothing is left.

    >>> select(parse("a slots=4\\nb slots=4"), exclude="a:0,1@b")
    (Host(name='a', slots=(2, 3)),)
    """
    if include and exclude:
        raise ConfigError(
            Problem(
                "--exclude",
                exclude,
                "given together with --include, which already selects what is used",
                "leave one of them out",
            )
        )
    if not include and not exclude:
        return hosts
    option, text = ("--include", include) if include else ("--exclude", exclude)
    named = _filter(hosts, option, text)
    kept = []
    for host in hosts:
        chosen = named.get(host.name, ())
        slots = chosen if include else tuple(slot for slot in host.slots if slot not in chosen)
        if slots:
            kept.append(Host(host.name, slots))
    if not kept:
        raise ConfigError(Problem(option, text, "leaves no machine", "leave some slots in"))
    return tuple(kept)


def _filter(hosts: tuple[Host, ...], option: str, text: str) -> dict[str, tuple[int, ...]]:
    known = {host.name: host.slots for host in hosts}
    names = {host.address: host.name for host in hosts}
    named: dict[str, tuple[int, ...]] = {}
    problems = []
    for part in text.split("@"):
        address, colon, numbers = part.strip().partition(":")
        # `@` stands between machines here, so users are left out
        name = names.get(address, address)
        if (
            f"{address}@" in {host.name.removesuffix(host.address) for host in hosts}
            and address not in names
        ):
            continue  # a user, of a name that was written as in the hostfile
        if name not in known:
            problems.append(
                Problem(
                    option,
                    part,
                    f"{name!r} is not in the hostfile",
                    f"use {', '.join(sorted(names)[:8])}",
                )
            )
            continue
        if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", numbers) if colon else False:
            problems.append(
                Problem(
                    option,
                    part,
                    "not slot numbers after the colon",
                    f"write for example `{name}:0,1`",
                )
            )
            continue
        slots = (
            tuple(sorted({int(number) for number in numbers.split(",")})) if colon else known[name]
        )
        absent = [slot for slot in slots if slot not in known[name]]
        if absent:
            problems.append(
                Problem(
                    option,
                    part,
                    f"{name} has slots 0 to {len(known[name]) - 1}, not {absent[0]}",
                    "name slots that exist",
                )
            )
            continue
        named[name] = tuple(sorted({*named.get(name, ()), *slots}))
    refuse(problems)
    return named
