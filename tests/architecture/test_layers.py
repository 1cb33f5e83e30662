"""Rules of the package: imports, the environment, private names of torch, documentation."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

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
    """Yield the node, the module and the imported name (or "") of every import in a file."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, node.module or "", alias.name


def _all_imports():
    """Yield the file, the node, the module and the imported name of every import of the package."""
    for path in FILES:
        for node, module, name in _imports(path):
            yield path, node, module, name


def _dotted(node):
    """Return `a.b.c` for an attribute chain, and an empty text for anything else."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(attributes)]) if isinstance(node, ast.Name) else ""


def test_imports_go_down_only_and_in_no_circle():
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        is_installed = importlib.util.find_spec("importlinter") is not None
        assert not is_installed, "import-linter is installed without its command"
        pytest.skip("import-linter is not installed")
    done = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[done.stdout.find("Contracts") :]


def test_nothing_imports_the_root_package_for_its_names():
    """`from plait import X` with a public name would import upper layers into lower ones."""
    modules = {path.stem for path in SOURCE.glob("*.py")}
    modules |= {path.name for path in SOURCE.iterdir() if path.is_dir()}
    failures = []
    for path, node, module, name in _all_imports():
        if module == "plait" and name not in modules:
            failures.append(_at(path, node))
    assert not failures


def test_only_topology_and_commands_read_the_environment():
    readers = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    failures = []
    for path in FILES:
        if not _name(path).startswith(("cluster/topology.py", "cli/")):
            failures += [_at(path, node) for node in nodes(path) if _dotted(node) in readers]
    for path, node, module, name in _all_imports():
        if f"{module}.{name}" in readers:
            failures.append(_at(path, node))
    assert not failures


OBJECTS_OF_TORCH = (
    torch,
    torch._C,
    torch.Generator,
    torch.Tensor,
    torch.UntypedStorage,
    torch.autograd.Variable,
    torch.nn,
    torch.nn.Module(),
    torch.nn.MultiheadAttention,
    torch.nn.Parameter(torch.ones(1)),
    torch.nn.modules.dropout,
    torch.ops.aten.add_.Tensor,
    torch.optim,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.SequentialLR,
    dist,
    dist.ProcessGroup,
    dist.distributed_c10d,
    torch.distributed.pipelining.schedules.Schedule1F1B,
    DeviceMesh,
    DTensor,
)
"""Objects that Plait gets from torch, whose private names it could use."""


@cache
def _private_names():
    """Return the names with an underscore of `OBJECTS_OF_TORCH` and of parts of `fully_shard`."""
    from torch._C._distributed_c10d import FakeWork
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

    parameter = torch.nn.Parameter(torch.ones(1))
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([parameter]))
    objects = [*OBJECTS_OF_TORCH, FakeWork, schedule]
    names: set[str] = set()
    for module in (_fsdp_state, _fsdp_param_group, _fsdp_param):
        for name, value in vars(module).items():
            if name.startswith(("FSDP", "_FSDP")):
                objects.append(value)
        names.update(re.findall(r"self\.(_[a-z]\w*)", Path(str(module.__file__)).read_text()))
    for value in objects:
        names.update(dir(value))
    return frozenset(name for name in names if re.match(r"_[a-zA-Z]", name))


DOCUMENTED = {"_monitor_workers", "_shutdown"}
"""Methods that torch documents for extending its launcher's agent."""
BY_NAME = ("getattr", "hasattr", "setattr")
OPERATORS = ("torch.ops", "_aten")
"""Namespaces of operators, whose names may begin with an underscore."""


def _uses_of_private_names(path):
    """Yield the places of a file that use a private name of torch."""
    for node, module, name in _imports(path):
        is_private = any(re.match(r"_[a-z]", part) for part in [*module.split("."), name])
        if module.split(".")[0] == "torch" and is_private:
            yield _at(path, node)

    # Names that the file defines may equal a name of torch by chance.
    defined = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in DOCUMENTED:
            defined.add(node.name)
        if isinstance(node, ast.Attribute) and _dotted(node.value) in ("self", "cls"):
            defined.add(node.attr)
    private = _private_names() - defined - DOCUMENTED
    for node in nodes(path):
        name = ""
        owner = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
            owner = _dotted(node.value)
        elif isinstance(node, ast.Call) and _dotted(node.func) in BY_NAME:
            name = getattr(node.args[1], "value", "")
        is_allowed = owner in ("self", "cls", "os", "sys") or owner.startswith(OPERATORS)
        if name in private and not is_allowed:
            yield f"{_at(path, node)} {name}"


def test_private_names_of_torch_are_only_in_their_package():
    known = {"_parameters", "_flatten", "_local_tensor", "_cdata", "_version", "_last_lr"}
    assert known <= _private_names()
    failures = []
    for path in FILES:
        if not _name(path).startswith("_torch/"):
            failures += _uses_of_private_names(path)
    assert not failures


LEAKS = """from torch.testing._internal import common_utils
from torch.utils import _pytree
mesh._flatten()
x.y[0]._local_tensor
getattr(module, '_buffers')
torch.ops.aten._unique2
self._version
engine.sharded.forward
"""


def test_private_names_of_torch_are_noticed(tmp_path, monkeypatch):
    path = tmp_path / "leak.py"
    path.write_text(LEAKS)
    monkeypatch.setattr(sys.modules[__name__], "_name", lambda path: path.name)
    uses = sorted(use.partition(":")[2] for use in _uses_of_private_names(path))
    assert uses == ["1", "2", "3 _flatten", "4 _local_tensor", "5 _buffers"]


PURE_PACKAGES = ("config/", "planner/", "model/")
IMPURE_MODULES = (
    "torch.distributed.",
    "torch.cuda.",
    "socket.",
    "subprocess.",
    "urllib.",
    "requests.",
    "huggingface_hub.",
)


def test_configuration_planner_and_model_facts_are_pure():
    """They return the same on a laptop, without process group, device and network."""
    failures = []
    for path, node, module, name in _all_imports():
        is_impure = f"{module}.{name}.".startswith(IMPURE_MODULES)
        if _name(path).startswith(PURE_PACKAGES) and is_impure:
            failures.append(f"{_at(path, node)} imports {module}")
    assert not failures


OPTIONAL = {
    "accelerate",
    "datasets",
    "deepspeed",
    "huggingface_hub",
    "matplotlib",
    "peft",
    "psutil",
    "tokenizers",
    "torchao",
    "transformers",
}


def test_optional_dependencies_are_imported_where_they_are_used():
    """Every module outside of `hf`, which needs Transformers, imports without them."""
    failures = []
    for path, node, module, _ in _all_imports():
        if _name(path).startswith("hf/"):
            continue
        is_at_the_top = node in tree(path).body
        if module.startswith("plait.hf") or (is_at_the_top and module.split(".")[0] in OPTIONAL):
            failures.append(f"{_at(path, node)} imports {module}")
    assert not failures


def _undocumented(body, owner="", *, has_bases=False):
    """Yield public functions and classes without a docstring.

    A method that may override an inherited one inherits its docstring.
    """
    for node in body:
        is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if not is_definition or node.name.startswith("_"):
            continue
        name = f"{owner}{node.name}"
        is_documented = ast.get_docstring(node) is not None
        if isinstance(node, ast.ClassDef):
            if not is_documented:
                yield node, name
            yield from _undocumented(node.body, f"{name}.", has_bases=bool(node.bases))
            continue
        decorators = " ".join(map(ast.dump, node.decorator_list))
        is_overload = "overload" in decorators or "setter" in decorators
        if not is_documented and not is_overload and not has_bases:
            yield node, name


def test_public_functions_are_documented_and_typed():
    failures = []
    for path in FILES:
        if path.name != "__main__.py" and not ast.get_docstring(tree(path)):
            failures.append(f"{_name(path)} has no docstring")
        for node, name in _undocumented(tree(path).body):
            failures.append(f"{_at(path, node)} {name} has no docstring")
        for node in nodes(path):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not node.name.startswith("_") and node.returns is None:
                failures.append(f"{_at(path, node)} {node.name} has no return type")
    assert not failures


def test_no_file_contains_a_path_of_a_developer():
    pattern = re.compile(r"/(work|home|root|Users)/[a-z]")
    failures = []
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if pattern.search(line):
                failures.append(f"{_name(path)}:{number}")
    assert not failures
