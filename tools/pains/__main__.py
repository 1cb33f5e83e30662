"""Run the fifteen scenarios with Plait, Accelerate, DeepSpeed and the Trainer of Transformers, and write docs/development/pains.md.

    python -m tools.pains                     all cells (10 to 30 minutes on two cores)
    python -m tools.pains --only 3 plait      one scenario, one library; either may be left out
    python -m tools.pains --page              the page alone, from benchmarks/results/pains.json

DeepSpeed is run by the Python that PLAIT_DEEPSPEED_PYTHON names, whose environment has it beside Plait's packages; its cells are left as
they were without.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common.machine import today
from tools.pains.page import DOCUMENT, RESULT, written
from tools.pains.scenarios import LIBRARIES, PAINS

ROOT = Path(__file__).parents[2]
SECONDS = 150
PEER = os.environ.get("PLAIT_DEEPSPEED_PYTHON", "")
_VERSION = "from importlib.metadata import version; print(version('deepspeed'))"
_NAMED = re.compile(r"rank 1\b[^\n]*(late|hang|has not|stuck|sleep|step 3)", re.IGNORECASE)
_NOISE = re.compile(r"^\s*(\[?(W|I|E)\d+|warning|traceback|\^|=+|-+|$)", re.IGNORECASE)


def cell(library: str, number: int) -> dict[str, Any]:
    """What a library does: {"outcome": right, wrong, refused, hang or error, "said": ...}."""
    if number == 15 and library == "plait":
        return _refused_file({"fp8": {"enabled": True}, "train_batch_size": 2})
    if number == 15:
        return {"outcome": "not run", "said": "no device here computes in float8"}
    with tempfile.TemporaryDirectory() as name:
        folder, saved = Path(name) / "cell", Path(name) / "saved"
        folder.mkdir()
        PAINS[number].task.model().save_pretrained(saved)
        python = PEER if library == "deepspeed" else sys.executable
        launch = (
            ["-m", "plait", "launch"]
            if library == "plait"
            else ["-m", "torch.distributed.run", "--standalone"]
        )
        script = Path(__file__).parent / "worker.py"
        command = [
            python,
            *launch,
            "--nproc-per-node",
            "2",
            str(script),
            library,
            str(number),
            str(folder),
            str(saved),
        ]
        began = time.monotonic()
        code, output = _run(command, folder, SECONDS if number != 9 else 90)
        seconds = time.monotonic() - began
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("found-*.json"))]
    if number == 9:
        named = _NAMED.search(output)
        if named:
            return {"outcome": "right", "said": f"ended with code {code}; {named.group(0)[:120]}"}
        return {
            "outcome": "wrong",
            "said": "no line names rank 1" if code is not None else "nothing said in 90 s",
        }
    if code is None:
        return {"outcome": "hang", "said": f"did not end in {SECONDS} s"}
    if len(found) < 2:
        return {"outcome": "error", "said": _error(output), "seconds": round(seconds)}
    worst, what = max(found)
    right = worst <= PAINS[number].limit
    said = what if number == 8 else f"{worst:.0f} {what}" if number == 2 else f"error {worst:.1e}"
    return {"outcome": "right" if right else "wrong", "said": said, "seconds": round(seconds)}


def _run(command: list[str], folder: Path, seconds: int) -> tuple[int | None, str]:
    path = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment = {
        **os.environ,
        **quiet,
        "PATH": path,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "ACCELERATE_USE_CPU": "true",
    }
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()


def _error(output: str) -> str:
    """The first line that names an exception."""
    lines = [
        line.strip()
        for line in output.splitlines()
        if re.search(r"\b\w*(Error|Exception|Refused)\b: ", line)
    ]
    found = (
        lines[0]
        if lines
        else next((line for line in reversed(output.splitlines()) if not _NOISE.match(line)), "")
    )
    return re.sub(r"^\[rank\d+\]:\s*", "", found)[:200]


def _refused_file(tree: dict[str, Any]) -> dict[str, Any]:
    import plait

    try:
        plait.load_config(tree)
    except plait.PlaitError as error:
        return {"outcome": "refused", "said": str(error).splitlines()[0][:200]}
    return {"outcome": "wrong", "said": "taken, and not computed"}


def parsed(arguments: list[str]) -> argparse.Namespace:
    """`only`: scenarios and libraries; `page`: whether nothing is run."""
    assert __doc__ is not None
    usage = {
        "prog": "python -m tools.pains",
        "description": __doc__,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = argparse.ArgumentParser(**usage)
    choices = [*map(str, PAINS), *LIBRARIES]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=choices,
        default=[],
        metavar="CELL",
        help=f"scenarios (1 to {len(PAINS)}), libraries",
    )
    parser.add_argument("--page", action="store_true", help="run nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Exit code 1 where Plait is wrong somewhere."""
    asked = parsed(arguments)
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {"cells": {}}
    if not asked.page:
        only = (
            [int(word) for word in asked.only if word.isdigit()],
            [word for word in asked.only if word in LIBRARIES],
        )
        known["date"] = today()
        known.setdefault("versions", {}).update(
            {name: version(name) for name in ("torch", "transformers", "accelerate", "peft")}
        )
        if PEER:
            known["versions"]["deepspeed"] = subprocess.check_output(
                [PEER, "-c", _VERSION], text=True
            ).strip()
        for number in only[0] or PAINS:
            for library in only[1] or LIBRARIES:
                if library == "deepspeed" and not PEER:
                    continue
                found = known["cells"].setdefault(str(number), {})[library] = cell(library, number)
                print(f"{number} {library}: {found}", flush=True)
                RESULT.write_text(json.dumps(known, indent=1) + "\n")
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    ours = [row["plait"]["outcome"] for row in known["cells"].values() if "plait" in row]
    print(f"Plait: right in {ours.count('right')} of {len(PAINS)}")
    return 0 if set(ours) <= {"right", "refused"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
