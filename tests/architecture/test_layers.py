"""The rules that keep the code readable in one direction: who imports whom, who reads the environment, who knows torch's private names."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.architecture.sources import FILES, ROOT, SOURCE, nodes, tree


def _name(path):
    return path.relative_to(SOURCE).as_posix()


def _at(path, node):
    return f"{_name(path)}:{getattr(node, 'lineno', 0)}"


def _imports(path):
    """(node, module, imported name or "") for every import anywhere in a file."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, node.module or "", alias.name


def _dotted(node):
    """`a.b.c` of an attribute chain; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def test_imports_go_down_only_and_in_no_circle():
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        assert importlib.util.find_spec("importlinter") is None, (
            "import-linter is installed without its command"
        )
        pytest.skip("import-linter is not installed")
    done = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[done.stdout.find("Contracts") :]


def test_nothing_imports_the_root_package_for_its_names():
    """`from plait import X` with a public name would pull upper layers into lower ones past the layer rule."""
    packages = {path.stem for path in SOURCE.glob("*.py")} | {
        path.name for path in SOURCE.iterdir() if path.is_dir()
    }
    bad = [
        _at(path, node)
        for path in FILES
        for node, module, name in _imports(path)
        if module == "plait" and name not in packages
    ]
    assert not bad


def test_only_topology_and_commands_read_the_environment():
    allowed = ("cluster/topology.py", "cli/")
    bad = [
        _at(path, node)
        for path in FILES
        if not _name(path).startswith(allowed)
        for node in nodes(path)
        if _dotted(node) in ("os.environ", "os.environb", "os.getenv", "os.putenv")
    ]
    bad += [
        _at(path, node)
        for path in FILES
        for node, module, name in _imports(path)
        if module == "os" and name in ("environ", "getenv", "putenv")
    ]
    assert not bad


@cache
def _hidden_by_torch():
    """Names with one underscore of what Plait gets from torch: tensors, modules, parts of `fully_shard`, groups, operators, schedules."""
    from torch._C._distributed_c10d import FakeWork
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

    parameter = torch.nn.Parameter(torch.ones(1))
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([parameter]))
    things: list[object] = [
        torch, dist, torch.nn, torch.optim, torch.Tensor, parameter, torch.UntypedStorage, torch.nn.Module(), torch.ops.aten.add_.Tensor,
        DeviceMesh, DTensor, FakeWork, dist.ProcessGroup, dist.distributed_c10d, torch.autograd.Variable, torch.optim.Optimizer, schedule,
        torch.optim.lr_scheduler.SequentialLR, torch.Generator, torch.nn.modules.dropout, torch.nn.MultiheadAttention,
        torch.distributed.pipelining.schedules.Schedule1F1B, torch._C,
    ]  # fmt: skip
    for module in (_fsdp_state, _fsdp_param_group, _fsdp_param):
        things += [
            thing for name, thing in vars(module).items() if name.startswith(("FSDP", "_FSDP"))
        ]
        written = re.findall(r"self\.(_[a-z]\w*)", Path(str(module.__file__)).read_text())
        things += [SimpleNamespace(**dict.fromkeys(written))]
    return frozenset(
        name for thing in things for name in dir(thing) if re.match(r"_[a-zA-Z]", name)
    )


DOCUMENTED = ("_monitor_workers", "_shutdown")
"""Methods that torch documents for extending its launcher's agent."""


BY_NAME = ("getattr", "hasattr", "setattr")


def _private_names_of_torch(path):
    own = {
        node.name for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    } - {*DOCUMENTED}
    own |= {
        node.attr
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and _dotted(node.value) in ("self", "cls")
    }
    for node, module, name in _imports(path):
        if module.split(".")[0] == "torch" and any(
            re.match(r"_[a-z]", part) for part in [*module.split("."), name]
        ):
            yield _at(path, node)
    names = _hidden_by_torch() - own - {*DOCUMENTED}
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            name, of = node.attr, _dotted(node.value)
        elif (
            isinstance(node, ast.Call)
            and _dotted(node.func) in BY_NAME
            and isinstance(node.args[1], ast.Constant)
        ):
            name, of = str(node.args[1].value), ""
        else:
            continue
        if (
            name in names
            and of not in ("self", "cls", "os", "sys")
            and not of.startswith(OPERATORS)
        ):
            yield f"{_at(path, node)} {name}"


OPERATORS = ("torch.ops", "_aten")
"""An operator's name may begin with an underscore."""


def test_private_names_of_torch_are_only_in_their_package():
    assert {
        "_parameters",
        "_flatten",
        "_local_tensor",
        "_cdata",
        "_version",
        "_last_lr",
    } <= _hidden_by_torch()
    bad = [
        found
        for path in FILES
        if not _name(path).startswith("_torch/")
        for found in _private_names_of_torch(path)
    ]
    assert not bad


def test_a_private_name_of_torch_is_found(tmp_path, monkeypatch):
    path = tmp_path / "leak.py"
    path.write_text(
        "from torch.testing._internal import common_utils\nfrom torch.utils import _pytree\nmesh._flatten()\nx.y[0]._local_tensor\n"
        "getattr(module, '_buffers')\ntorch.ops.aten._unique2\nself._version\nengine.sharded.forward\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "_name", lambda path: path.name)
    found = sorted(found.partition(":")[2] for found in _private_names_of_torch(path))
    assert found == ["1", "2", "3 _flatten", "4 _local_tensor", "5 _buffers"]


PURE_PACKAGES = ("config", "planner", "model")
IMPURE_MODULES = ("torch.distributed", "torch.cuda", "socket", "subprocess", "urllib", "requests", "huggingface_hub")  # fmt: skip


def test_configuration_planner_and_model_facts_are_pure():
    """They decide the same on a laptop: no process group, no device, no network."""
    bad = [
        f"{_at(path, node)} imports {module}"
        for path in FILES
        if _name(path).startswith(tuple(f"{package}/" for package in PURE_PACKAGES))
        for node, module, name in _imports(path)
        if any(f"{module}.{name}.".startswith(f"{impure}.") for impure in IMPURE_MODULES)
    ]
    assert not bad


OPTIONAL = (
    "transformers", "tokenizers", "datasets", "accelerate", "huggingface_hub", "peft", "torchao", "matplotlib", "deepspeed", "psutil",
)  # fmt: skip


def test_optional_dependencies_are_imported_where_they_are_used():
    """Importing any module of Plait must work with the core dependencies alone. `hf` stands on Transformers, and nothing imports it."""
    bad = []
    for path in FILES:
        if _name(path).startswith("hf/"):
            continue
        bad += [
            f"{_at(path, node)} imports plait.hf"
            for node, module, _ in _imports(path)
            if module.startswith("plait.hf")
        ]
        for node in tree(path).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            bad += [
                f"{_at(path, node)} imports {module}"
                for module in modules
                if module.split(".")[0] in OPTIONAL
            ]
    assert not bad


def _documented(body, owner, bases):
    """Public functions and classes without a docstring. A method that may override an inherited one inherits its text."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            if ast.get_docstring(node) is None:
                yield node, f"{owner}{node.name}"
            yield from _documented(node.body, f"{owner}{node.name}.", bool(node.bases))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
            "_"
        ):
            overload = any(
                "overload" in ast.dump(decorator) or "setter" in ast.dump(decorator)
                for decorator in node.decorator_list
            )
            if ast.get_docstring(node) is None and not overload and not (owner and bases):
                yield node, f"{owner}{node.name}"


def test_public_functions_are_documented_and_typed():
    failures = []
    for path in FILES:
        if path.name != "__main__.py" and not ast.get_docstring(tree(path)):
            failures.append(f"{_name(path)} has no docstring")
        for node, name in _documented(tree(path).body, "", False):
            failures.append(f"{_at(path, node)} {name} has no docstring")
        for node in nodes(path):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not node.name.startswith("_") and node.returns is None:
                failures.append(f"{_at(path, node)} {node.name} has no return type")
    assert not failures


def test_a_file_says_nothing_of_where_it_was_written():
    """Absolute paths of a developer's machine have no place in a product."""
    pattern = re.compile(r"/(work|home|root|Users)/[a-z]")
    bad = [
        f"{_name(path)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not bad
