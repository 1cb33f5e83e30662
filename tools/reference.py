"""Write the reference pages of docs/reference from the program itself.

    python -m tools.reference            write the pages
    python -m tools.reference --check    exit 1 if a page is not what this would write

configuration.md lists every key of the configuration file, command-line.md every command with its
options, and python.md the public functions and classes with their docstrings.
"""

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import typer

import plait
from benchmarks.common.report import ROOT, write_page
from plait.cli.main import COMMANDS, NESTED_COMMANDS, load_app
from plait.config.resolving.json_schema import json_schema

PAGES = ROOT / "docs" / "reference"
HEADER = "<!-- Written by `make reference-docs`; do not edit. -->\n\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


class Configuration:
    """Page of the configuration keys, from the JSON schema of the file."""

    def __init__(self) -> None:
        self._schema = json_schema()
        self._deprecated = ""
        self._aliases = ""

    def page(self) -> str:
        sections = "\n".join(self._sections("", self._schema))
        return f"""{HEADER}# Configuration

Every key of the JSON or YAML file. `plait config explain FILE` prints the same keys
with the values of a file and where each value came from; `plait config schema` prints
the JSON schema for an editor. A key that is not on this page is refused, with the
nearest known key. A meaning that begins with a name and a colon (`tp: ...`, `nvme: ...`)
applies only if that degree, value or setting is used.
{sections}
## Keys of DeepSpeed that are accepted and ignored, or refused

A value that would change what is computed is refused; the others have no effect.

| key | what happens |
|---|---|
{self._deprecated}
## Other names

| key | meaning |
|---|---|
{self._aliases}"""

    def _sections(self, path: str, node: dict[str, Any]) -> Iterator[str]:
        rows = []
        children = []
        for name, entry in node.get("properties", {}).items():
            key = f"{path}.{name}".lstrip(".")
            description = entry.get("description", "")
            section = self._section(entry)
            if description.startswith("Another name of"):
                self._aliases += f"| `{key}` | {cell(description)} |\n"
            elif entry.get("deprecated"):
                self._deprecated += f"| `{key}` | {cell(description)} |\n"
            elif section is not None:
                children.append((key, section))
            else:
                default = json.dumps(entry.get("default"))
                default = "" if default == "null" else f"`{default}`"
                kind = cell(self._type(entry))
                rows.append(f"| `{name}` | {kind} | {default} | {cell(description)} |")
        if rows:
            title = f"`{path}`" if path else "Top level"
            yield f"\n## {title}\n"
            if path and node.get("description"):
                for paragraph in node["description"].split("\n\n"):
                    yield textwrap.fill(paragraph, 100, break_on_hyphens=False) + "\n"
            yield "| key | values | default | meaning |\n|---|---|---|---|"
            yield from rows
        for key, child in children:
            yield from self._sections(key, child)

    def _section(self, entry: dict[str, Any]) -> dict[str, Any] | None:
        """Return the section that a key holds, or None for a plain value."""
        if "properties" in entry:
            return entry
        for option in [entry, *entry.get("anyOf", ())]:
            if "$ref" in option:
                name = option["$ref"].rpartition("/")[2]
                definition: dict[str, Any] = self._schema["$defs"][name]
                return definition if "properties" in definition else None
        return None

    def _type(self, entry: dict[str, Any]) -> str:
        options = entry.get("anyOf") or entry.get("oneOf")
        if options:
            names = dict.fromkeys(self._type(option) for option in options)
            return ", ".join(name for name in names if name != "null")
        if "const" in entry:
            return f"`{json.dumps(entry['const'])}`"
        if "enum" in entry:
            return ", ".join(f"`{json.dumps(value)}`" for value in entry["enum"])
        kind = entry.get("type", "any")
        if kind == "array":
            return f"list of {self._type(entry.get('items', {}))}"
        name = kind if isinstance(kind, str) else " or ".join(kind)
        return name + _bounds(entry)


def _bounds(entry: dict[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = []
    for key, sign in signs.items():
        # The largest integers of 32 and 64 bits bound every number and say nothing to a reader.
        if key in entry and (sign[0] == ">" or entry[key] < 2**20):
            bounds.append(f"{sign} {entry[key]}")
    return f" ({', '.join(bounds)})" if bounds else ""


def command_line() -> str:
    text = [
        f"{HEADER}# Command line\n",
        "`plait COMMAND --help` prints the same text. `plait --version` prints the version.\n",
        "| command | purpose |\n|---|---|",
    ]
    for name, (_, line) in COMMANDS.items():
        text.append(f"| [`plait {name}`](#plait-{name}) | {cell(line)} |")
    text.append(
        "\nExit codes: 0 done; 1 a rank failed or nothing fits; 2 wrong command line or file;"
        "\n3 the layout computes something else than one process; 4 the checkpoint cannot be used;"
        "\n5 a collective cannot complete because a rank hangs or ended; 6 no GPU to validate;"
        "\n7 numbers that are not finite; 128 + N ended by signal N.\n"
    )
    for name, (target, _) in COMMANDS.items():
        text.extend(_command(f"plait {name}", load(target)))
        for nested, nested_target in NESTED_COMMANDS.items():
            if nested[0] == name:
                text.extend(_command(f"plait {' '.join(nested)}", load(nested_target)))
    return "\n".join(text)


def load(target: str) -> Any:
    """Return the command whose app is given as `module:name`."""
    return typer.main.get_command(load_app(target))


def _command(name: str, command: Any) -> Iterator[str]:
    """Yield the lines of a command and of its subcommands."""
    children = getattr(command, "commands", None)
    level = "##" if children or name.count(" ") == 1 else "###"
    yield f"{level} `{name}`\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    for word, child in (children or {}).items():
        yield from _command(f"{name} {word}", child)
    rows = []
    for parameter in command.params if children is None else ():
        if not getattr(parameter, "hidden", False) and parameter.name != "help":
            rows.append(f"| {_signature(parameter)} | {cell(_meaning(parameter))} |")
    if rows:
        yield "| argument or option | meaning |\n|---|---|"
        yield from rows
        yield ""


def _signature(parameter: Any) -> str:
    value = f"`{parameter.metavar or parameter.name.upper()}`"
    if parameter.param_type_name == "argument":
        return value
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return names if getattr(parameter, "is_flag", False) else f"{names} {value}"


def _meaning(parameter: Any) -> str:
    text = getattr(parameter, "help", None) or ""
    default = parameter.default
    if default in (None, False, True, ()) or callable(default) or "default" in text:
        return text
    return f"{text} (default: {default})"


def python() -> str:
    text = [
        f"{HEADER}# Python\n",
        'Names of the package `plait`. "Collective" means that all ranks have to call it.\n',
    ]
    for name in sorted(plait.__all__, key=str.lower):
        value = getattr(plait, name)
        if inspect.isclass(value):
            text.extend(_class(name, value))
        elif callable(value):
            text.extend(_function(f"plait.{name}", value, "##"))
    return "\n".join(text)


def _function(name: str, function: Any, level: str) -> Iterator[str]:
    yield f"{level} `{name}`\n"
    yield f"```text\n{name.rpartition('.')[2]}{_arguments(function)}\n```\n"
    yield _docstring(function) + "\n"


def _class(name: str, kind: type) -> Iterator[str]:
    yield f"## `plait.{name}`\n"
    yield _docstring(kind) + "\n"
    members = {key: value for key, value in vars(kind).items() if not key.startswith("_")}
    for key, value in members.items():
        if isinstance(value, property):
            yield f"- `{key}`: {' '.join((value.__doc__ or '').split())}"
    yield ""
    for key, value in members.items():
        if inspect.isfunction(value):
            yield from _function(f"{name}.{key}", value, "###")


def _arguments(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [p for name, p in signature.parameters.items() if name != "self"]
    inner = "".join(f"\n    {parameter}," for parameter in parameters)
    inner = re.sub(r"'([^'\n]*)'", r"\1", inner)
    inner = re.sub(r"<function (\w+) at 0x\w+>", r"\1", inner)
    returned = signature.return_annotation
    arrow = "" if returned is inspect.Signature.empty else f" -> {returned}"
    end = "\n" * bool(parameters)
    return f"({inner}{end}){arrow}"


def _docstring(value: Any) -> str:
    """Return a docstring as Markdown. Sections of Google style with entries become lists."""
    lines = []
    section = ""
    for line in inspect.cleandoc(value.__doc__ or "").splitlines():
        entry = re.match(r"    ([\w.*]+): (.*)", line)
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            lines.append(f"**{line}**\n")
            section = line
        elif section in ("Returns:", "Yields:") and line.startswith("    "):
            lines.append(line.strip())
        elif section and re.match(r"    \S", line):
            lines.append(f"- `{entry[1]}`: {entry[2]}" if entry else f"- {line.strip()}")
        elif section and line.startswith("      "):
            lines.append(f"  {line.strip()}")
        else:
            section = "" if line else section
            lines.append(line)
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    pages = {
        "configuration.md": Configuration().page(),
        "command-line.md": command_line(),
        "python.md": python(),
    }
    check = "--check" in arguments
    codes = [
        write_page(PAGES / name, text.rstrip() + "\n", check=check) for name, text in pages.items()
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
