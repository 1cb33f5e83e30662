"""Another kind of accelerator is a change of one file: nothing else in the package names this one."""

import ast
import re
from collections import Counter

from tests.architecture.sources import FILES, SOURCE, tree

ONE_PLACE = ("cluster/accelerator.py",)
NAMES_IT = re.compile("cuda|nccl", re.IGNORECASE)
ELSEWHERE = {
    "config/dialects/deepspeed.py": (2, "what fields of DeepSpeed's files mean"),
    "config/convert/megatron.py": (1, "what flags of Megatron-LM mean"),
    "_torch/attention.py": (7, "torch's own names of the switches and operators of fused attention"),
    "validation/catalogue.py": (5, "rows about NCCL"),
    "validation/profile.py": (7, "names of CUDA's calls and of NCCL's kernels in a profile, and torch's warning of a wait"),
    "validation/rows.py": (1, "the rows about NCCL"),
    "cli/doctor.py": (6, "the option --nccl, its help and what contradicts it"),
}  # fmt: skip
"""File to uses that it needs, and for what."""


def uses(module):
    """Names, attributes, arguments and texts of a module that name it. What a docstring or a comment says is prose."""
    prose = {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(module):
        match node:
            case (
                ast.Name(id=text)
                | ast.Attribute(attr=text)
                | ast.arg(arg=text)
                | ast.keyword(arg=str(text))
            ):
                pass
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
                pass
            case ast.Constant(value=str(text)) if id(node) not in prose:
                pass
            case _:
                continue
        if NAMES_IT.search(text):
            yield f"line {getattr(node, 'lineno', 0)}: {text}"


def test_one_file_names_the_accelerator():
    """Elsewhere only what a file or a command is written with, counted; take a use away, and lower its count here."""
    found = {
        path.relative_to(SOURCE).as_posix(): named
        for path in FILES
        if (named := list(uses(tree(path))))
    }
    elsewhere = Counter(
        {file: len(named) for file, named in found.items() if file not in ONE_PLACE}
    )
    expected = Counter({file: count for file, (count, _) in ELSEWHERE.items()})
    wrong = {
        file: found.get(file, [])
        for file in elsewhere.keys() | expected.keys()
        if elsewhere[file] != expected[file]
    }
    assert not wrong, f"use plait.cluster.accelerator: {wrong}"


def test_what_counts():
    """A use in code does, prose does not."""
    text = '"""CUDA."""\nx = torch.cuda.is_available()  # CUDA\ny = "cuda:0"'
    assert len(list(uses(ast.parse(text)))) == 2
