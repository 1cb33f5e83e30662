"""A damaged file gets a message with the field, the rule and the remedy, and never a traceback."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from plait.cli.main import main
from plait.config.resolving.resolve import load
from plait.errors import ConfigError, PlaitError
from tests.table import check_rows
from tests.unit.config.mutations import TRAINED, mutated

LINE = re.compile(r"^plait: \S.*: .+")


class Tokenizer:
    """Tokenizer with one token per character."""

    bos_token_id = eos_token_id = 0
    chat_template = None

    def __len__(self):
        return 1024

    def __call__(self, text, **_):
        return {"input_ids": [1] * len(text)}

    def get_vocab(self):
        return {str(index): index for index in range(1024)}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command on a mutated file, and checks what it prints."""
    from plait.cli import launch, train
    from plait.train import session

    data: Any = SimpleNamespace(
        tokenizer=Tokenizer(), train=[0] * 4096, validation=[0], validation_note="", identity={}
    )
    # Thousands of files are read: nothing is tokenized, and no process is started.
    monkeypatch.setattr(session, "prepare", lambda *_, **__: data)
    monkeypatch.setattr(launch, "run", lambda *_, **__: 0)
    monkeypatch.setattr(train, "_train", lambda *_, **__: 0)
    monkeypatch.setattr(train, "_announce", lambda *_, **__: None)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(verb, seed):
        """Return the exit code."""
        ending, content, overrides = mutated(seed, trained=verb in ("train", "layout"))
        file = tmp_path / f"m{ending}"
        file.write_bytes(content)
        arguments = [*verb.split(), str(file)]
        for text in overrides:
            arguments += ["--set", text]

        case = f"seed {seed}, {verb} {overrides}"
        try:
            code = main(arguments) or 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            raise AssertionError(f"{case}: {error!r:.300}\n{content[:2000]!r}") from error

        output = capsys.readouterr().err
        assert "Traceback" not in output
        if code:
            lines = [line for line in output.splitlines() if line.startswith("plait: ")]
            assert code in (1, 2) and lines, f"{case}: exit code {code}, {output[:300]!r}"
            for line in lines:
                assert LINE.match(line) and len(line) < 5000, f"{case}: {line}"
        return code

    return run


def test_a_mutated_file_is_explained_or_refused(command):
    codes = [command("config explain", seed) for seed in range(100)]
    assert min(codes.count(0), codes.count(2)) > 1


def test_a_mutated_file_is_checked_for_training(command):
    codes = [command("train", seed) for seed in range(1000, 1030)]
    assert codes.count(0) > 1 and codes.count(2) > 10


@pytest.mark.proof
@pytest.mark.parametrize("part", range(8))
def test_two_thousand_mutated_files(command, part):
    for seed in range(10_000 + 250 * part, 10_250 + 250 * part):
        command(("config explain", "train", "layout", "config explain --json")[seed % 4], seed)


UNUSABLE = {
    f'{{"train_batch_size": {"9" * 5000}}}': (
        "train_batch_size = '999999999999...': is a number of about 300 digits or more"
    ),
    '{"run": {"folder": "a\\ud800"}}': "run.folder = 'a\\ud800': contains half of a character",
    '{"run": {"folder": "a\\u0000"}}': "run.folder = 'a\\x00': contains a zero byte",
    '{"a": ' * 2000 + "1" + "}" * 2000: "is nested",
    "[" * 100_000: "is nested too deeply",
    '{"communication_data_type": [0.9]}': "communication_data_type = [0.9]: must be",
    '{"run": {"seed": 1e29}}': "run.seed = 1e+29: must be",
    '{"parallel": {"tp": 9007199254740993}}': (
        "parallel.tp = 9007199254740993: must be at most 1048576"
    ),
}


@pytest.mark.parametrize("ending", [".json", ".yaml"])
def test_values_that_no_setting_can_have_are_refused(ending, tmp_path):
    def check(row):
        text, message = row
        if ending == ".yaml":
            # The parser of YAML needs a second per 10,000 brackets.
            text = text.replace("[" * 100_000, "[" * 2000)
        file = tmp_path / f"x{ending}"
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            load(file)
        assert message in str(error.value)

    check_rows({text[:50]: (text, message) for text, message in UNUSABLE.items()}, check)


def test_references_of_yaml_do_not_multiply(tmp_path):
    lines = ["a: &a [1,1,1,1,1,1,1,1,1]"]
    for previous, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{previous}'] * 9)}]")
    file = tmp_path / "x.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="contains more than 200,000 values"):
        load(file)
    file.write_text("a: &a {b: *a}\n")
    with pytest.raises(PlaitError):
        load(file)


def test_unusable_overrides_are_refused():
    for text in (
        "a=" + "[" * 2000,
        "train_batch_size=" + "9" * 5000,
        "run.folder=\ud800",
        ".".join("a" * 100) + "=1",
    ):
        with pytest.raises(ConfigError):
            load(TRAINED, [text])
