"""Numbers that torchao 0.18.0 computes (torchao_numbers.json), and functions to repeat them.

    python -m tests.unit.optim.torchao_numbers [--check]

writes the file and needs torchao, but no compiler. `--check` compares with the file and writes
nothing (`make torchao`). Tests do not depend on torchao: Transformers imports it in every process
if it is installed.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

FILE = Path(__file__).with_name("torchao_numbers.json")
PARAMS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
STEPS = 20
SHAPE = (4, 2048)
BLOCK = 256
CLASSES = {"int8": "AdamW8bit", "float8": "AdamWFp8", "int8, decay in gradients": "Adam8bit"}


def waves(count, *, phase=0.0):
    """Return float32 numbers between -1 and 1 that are the same on every machine."""
    index = torch.arange(count, dtype=torch.float64)
    values = torch.sin(0.7 * index + phase) * torch.cos(0.013 * index * (1 + phase))
    # Five decimals hide the last bits, in which sine and cosine may differ between machines.
    return torch.tensor([round(value, 5) for value in values.tolist()])


def numbers(*, signed):
    """Return 8192 float32 numbers whose blocks cover eight powers of ten."""
    values = waves(8192) * torch.tensor([10.0 ** -(index % 9) for index in range(8192)])
    return values if signed else values.square()


def trained(build_optimizer, *, dtype=torch.float32):
    """Return a parameter of `SHAPE` after noisy steps towards a target.

    `build_optimizer(parameters)` returns the optimizer.
    """
    count = math.prod(SHAPE)
    parameter = nn.Parameter(waves(count).view(SHAPE).to(dtype))
    target = waves(count, phase=1.0).view(SHAPE)
    optimizer = build_optimizer([parameter])
    for step in range(STEPS):
        noise = waves(count, phase=2.0 + step).view(SHAPE)
        parameter.grad = (parameter.detach() - target + noise).to(dtype) * 0.1
        optimizer.step()
    return parameter


def packed(tensor):
    """Return the bytes of a tensor as text."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return base64.b64encode(data).decode()


def unpacked(text, dtype):
    """Return a one-dimensional tensor with the bytes of `packed`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


def equal_up_to_rounding(actual, expected):
    """Return whether trained parameters are equal up to the rounding of float32.

    It differs between processors, and gives a few numbers in a thousand another code.
    """
    difference = (actual.detach().flatten() - expected.flatten()).abs()
    share = (difference > 2e-6).double().mean()
    return bool(share < 0.01 and difference.max() < PARAMS["lr"])


def _agree(name, actual, recorded):
    if actual is None or recorded is None or not name.startswith("trained "):
        return actual == recorded
    return equal_up_to_rounding(unpacked(actual, torch.float32), unpacked(recorded, torch.float32))


def _compute():
    import torchao.optim
    from torchao.optim.subclass_8bit import OptimState8bit, get_qmap_signed, get_qmap_unsigned
    from torchao.optim.subclass_fp8 import OptimStateFp8

    results: dict[str, str] = {}
    for name, signed in (("average", True), ("squares", False)):
        levels = get_qmap_signed() if signed else get_qmap_unsigned()
        results[f"levels {name}"] = packed(torch.tensor(levels))
        values = numbers(signed=signed)
        for kind, state in (
            ("int8", OptimState8bit.zeros(values.shape, signed, BLOCK)),
            ("float8", OptimStateFp8.zeros(values.shape, BLOCK)),
        ):
            state.copy_(values)
            results[f"codes {kind} {name}"] = packed(state.codes)
            results[f"scales {kind} {name}"] = packed(state.scale)
    with torch.compiler.set_stance("force_eager"):
        for name, kind in CLASSES.items():
            optimizer = getattr(torchao.optim, kind)
            parameter = trained(lambda group, build=optimizer: build(group, **PARAMS))
            results[f"trained {name}"] = packed(parameter)
    return results


def _main():
    results = _compute()
    if "--check" not in sys.argv:
        FILE.write_text(json.dumps(results, indent=0) + "\n")
        return
    recorded = json.loads(FILE.read_text())
    different = []
    for name in sorted({*results, *recorded}):
        if not _agree(name, results.get(name), recorded.get(name)):
            different.append(name)
    if different:
        sys.exit(f"torchao computes other numbers than {FILE.name} has: {', '.join(different)}")


if __name__ == "__main__":
    _main()
