"""Files that the command lines of `bad_values.jsonl` use: a run that could start, and wrong files.

A line of the table is [kind, command line, text of the message]. A fourth entry "quick" puts it
into `make test`. The kinds are "set" for values of `--set` of `plait train run.json`, "plan" for
further arguments of a `plait plan` that would succeed, and "cmd" for complete command lines.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.tiny import llama

RUN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": llama(num_attention_heads=4, max_position_embeddings=64),
    "data": {
        "source": "files",
        "paths": ["text.txt"],
        "vocab_size": 300,
        "sequence_length": 16,
        "cache": "cache",
    },
    "run": {"folder": "run", "steps": 2, "processes": 2},
}
_PLAN = "plan --model llama-3-8b --gpu h100 --world-size 8"


class Case(NamedTuple):
    """A command line that is refused."""

    arguments: list[str]
    message: str
    quick: bool


def cases():
    """Return the rows of the table."""
    rows = []
    for line in Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines():
        kind, text, message, *marks = json.loads(line)
        arguments = shlex.split(text)
        if kind == "set":
            settings = [text for value in arguments for text in ("--set", value)]
            arguments = ["train", "run.json", *settings]
        elif kind == "plan":
            arguments = [*_PLAN.split(), *arguments]
        rows.append(Case(arguments, message, bool(marks)))
    return rows


def _model(**changes):
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "intermediate_size": 64,
    }
    return json.dumps({"model_type": "llama", **sizes, **changes})


def files():
    """Return the content of every file by its name."""
    run = json.dumps(RUN)
    return {
        "run.json": run,
        "text.txt": "It was the best of times, it was the worst of times. " * 200,
        "short.txt": "short",
        "empty.txt": "",
        "binary.txt": bytes(range(256)) * 9,
        "ok.py": "print(1)\n",
        # text as JSON lines
        "bad.jsonl": '{"text": "a"}\n{"text": \n',
        "list.jsonl": "[1]\n",
        "nofield.jsonl": '{"body": "a"}\n',
        "numbers.jsonl": '{"text": 7}\n',
        "empty.jsonl": "\n\n",
        "binary.jsonl": b'{"text": "\xff\xfe"}\n',
        "deep.jsonl": "[" * 100_000 + "\n",
        "surrogate.jsonl": '{"text": "a \\ud800 b"}\n' * 50,
        "digits.jsonl": '{"text": ' + "9" * 6000 + "}\n",
        # configurations
        "e.json": "",
        "ws.json": "  \n",
        "bin.json": bytes(range(256)),
        "nul.json": run.replace('run"', 'r\\u0000un"'),
        "rawnul.json": run.encode()[:20] + b"\0" + run.encode()[20:],
        "utf16.json": run.encode("utf-16"),
        "trunc.json": run[:60],
        "list.json": "[]",
        "num.json": "7",
        "str.json": '"x"',
        "null.json": "null",
        "true.json": "true",
        "deep.json": '{"a":' * 3000 + "1" + "}" * 3000,
        "deep2.json": "[" * 90_000,
        "dup.json": '{"train_batch_size": 4, "train_batch_size": 8}',
        "nan.json": '{"gradient_clipping": NaN}',
        "inf.json": '{"gradient_clipping": -Infinity}',
        "sur.json": '{"run": {"folder": "\\ud800"}}',
        "big.json": '{"train_batch_size": ' + "9" * 5000 + "}",
        "single.json": "{'train_batch_size': 4}",
        "two.json": "{}{}",
        "long.json": json.dumps({"x" * 10_000: 1}),
        "emptykey.json": '{"": 1}',
        "yaml.yaml": "a: [1",
        "tab.yaml": "a:\n\t- b",
        "tag.yaml": "a: !!python/object/apply:os.system ['x']",
        "multi.yaml": "a: 1\n---\nb: 2",
        "keynum.yaml": "1: 2",
        "anchor.yaml": "a: &a {b: *a}",
        "toml.toml": "a = 1",
        "py.py": "x = 1",
        "secret.json": '{"wandb": {"api_key": "x"}}',
        "acc.yaml": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 3}\n",
        "ds.json": '{"train_batch_size": 8}',
        # clusters, hosts, models, tables
        "h0": "",
        "h1": "# only\n",
        "h2": "a slots=x\n",
        "h3": "a slots=0\n",
        "h4": "a slots=-1\n",
        "h5": "a slots=2\na slots=2\n",
        "h6": "a\n",
        "h7": "slots=2\n",
        "h8": bytes(range(256)),
        "h9": "a slots=99999999999999999999999\n",
        "h10": "a slots=2 b slots=3\n",
        "h12": "a slots=2\nb slots=2\n",
        "h13": "-oProxyCommand=x slots=2\n",
        "m0.json": "{}",
        "m1.json": _model(hidden_size=0),
        "m2.json": _model(hidden_size="x"),
        "m3.json": _model(num_hidden_layers=0),
        "m4.json": _model(hidden_size=1e18, vocab_size=2**40),
        "m5.json": _model(num_key_value_heads=0),
        "m6.json": '{"model_type": "bert"}',
        "m7.json": _model(num_hidden_layers=-3, num_key_value_heads=3),
        "cal1.json": "{}",
        "cal2.json": '{"time": 3, "format": "x"}',
    }


def write_files(folder):
    """Write all `files`, an empty folder, three damaged models, and a link to itself."""
    for name, content in files().items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "folder").mkdir()
    os.symlink("loop", folder / "loop")
    for name, text in (
        ("badmodel", "{}"),
        ("badmodel2", "{"),
        ("badmodel3", '{"model_type": "llama", "hidden_size": "x"}'),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
        (folder / name / "model.safetensors").write_bytes(b"junk")
