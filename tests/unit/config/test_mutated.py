"""Whatever is wrong with a file, the command says what, where and what to do, and never ends in a traceback (faults F, mutated configs)."""

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


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """A verb on a mutated file, up to where processes would start; text and tokenizer stand ready."""
    from plait.cli import launch, train
    from plait.train import session

    class Tokenizer:
        bos_token_id = eos_token_id = 0
        chat_template = None

        def __len__(self):
            return 1024

        def __call__(self, text, **_):
            return {"input_ids": [1] * len(text)}

        def get_vocab(self):
            return {str(index): index for index in range(1024)}

    prepared: Any = SimpleNamespace(
        tokenizer=Tokenizer(), train=[0] * 4096, validation=[0], validation_note="", identity={}
    )
    monkeypatch.setattr(session, "prepare", lambda *_, **__: prepared)
    monkeypatch.setattr(launch, "run", lambda *_, **__: 0)
    monkeypatch.setattr(train, "_train", lambda *_, **__: 0)
    monkeypatch.setattr(train, "_announce", lambda *_, **__: None)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(verb, seed):
        ending, content, overrides = mutated(seed, trained=verb in ("train", "layout"))
        file = tmp_path / f"m{ending}"
        file.write_bytes(content)
        options = [argument for text in overrides for argument in ("--set", text)]
        try:
            code = main([*verb.split(), str(file), *options]) or 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            what = f"{type(error).__name__}: {str(error)[:300]}"
            raise AssertionError(
                f"seed {seed}, {verb} {overrides}: {what}\n{content[:2000]!r}"
            ) from error
        said = capsys.readouterr().err
        assert "Traceback" not in said
        if code:
            lines = [line for line in said.splitlines() if line.startswith("plait: ")]
            assert code in (1, 2) and lines, f"seed {seed}: exit code {code} and {said[:300]!r}"
            assert all(LINE.match(line) and len(line) < 5000 for line in lines), (
                f"seed {seed}: {lines}"
            )
        return code

    return run


def test_a_mutated_file_is_explained_or_refused(command):
    """A cover of what `make proof` runs at length."""
    codes = [command("config explain", seed) for seed in range(100)]
    assert min(codes.count(0), codes.count(2)) > 1


def test_a_mutated_file_is_checked_for_training(command):
    codes = [command("train", seed) for seed in range(1000, 1030)]
    assert codes.count(0) > 1 and codes.count(2) > 10


@pytest.mark.proof
@pytest.mark.parametrize("part", range(8))
def test_two_thousand_mutated_files(command, part):
    """2,000 files through the command line, each by one verb."""
    for seed in range(10_000 + 250 * part, 10_250 + 250 * part):
        command(("config explain", "train", "layout", "config explain --json")[seed % 4], seed)


UNUSABLE = {
    '{"train_batch_size": ' + "9" * 5000 + "}": "train_batch_size = '999999999999...': is a number of about 300 digits or more",
    '{"run": {"folder": "a\\ud800"}}': "run.folder = 'a\\ud800': contains half of a character",
    '{"run": {"folder": "a\\u0000"}}': "run.folder = 'a\\x00': contains a zero byte",
    '{"a": ' * 2000 + "1" + "}" * 2000: "is nested",
    "[" * 100_000: "is nested too deeply",
    '{"communication_data_type": [0.9]}': "communication_data_type = [0.9]: must be",
    '{"run": {"seed": 1e29}}': "run.seed = 1e+29: must be",
    '{"parallel": {"tp": 9007199254740993}}': "parallel.tp = 9007199254740993: must be at most 1048576",
}  # fmt: skip


@pytest.mark.parametrize("ending", [".json", ".yaml"])
def test_what_no_setting_can_use_is_named(ending, tmp_path):
    def check(row):
        file = tmp_path / f"x{ending}"
        # The parser of YAML needs a second for each 10,000.
        text = row[0] if ending == ".json" else row[0].replace("[" * 100_000, "[" * 2000)
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            load(file)
        assert row[1] in str(error.value)

    check_rows({text[:50]: (text, words) for text, words in UNUSABLE.items()}, check)


def test_references_of_yaml_do_not_multiply(tmp_path):
    file = tmp_path / "x.yaml"
    nines = "".join(
        f"{n}: &{n} [{', '.join([f'*{p}'] * 9)}]\n"
        for p, n in zip("abcdefgh", "bcdefghi", strict=True)
    )
    file.write_text("a: &a [1,1,1,1,1,1,1,1,1]\n" + nines)
    with pytest.raises(ConfigError, match="contains more than 200,000 values"):
        load(file)
    file.write_text("a: &a {b: *a}\n")
    with pytest.raises(PlaitError):
        load(file)


def test_overrides_too():
    for value in (
        "a=" + "[" * 2000,
        "train_batch_size=" + "9" * 5000,
        "run.folder=\ud800",
        ".".join("a" * 100) + "=1",
    ):
        with pytest.raises(ConfigError):
            load(TRAINED, [value])
