"""A single file names the accelerator, so another kind of accelerator is a change of one file."""

import ast
import re

from tests.architecture.sources import FILES, SOURCE, tree

ACCELERATOR_FILE = "cluster/accelerator.py"
ACCELERATOR = re.compile("cuda|nccl", re.IGNORECASE)
ELSEWHERE = {
    "config/dialects/deepspeed.py": 2,  # meanings of fields of DeepSpeed's files
    "config/convert/megatron.py": 1,  # meanings of flags of Megatron-LM
    "_torch/attention.py": 7,  # torch's switches and operators of fused attention
    "validation/catalogue.py": 5,  # rows about NCCL
    "validation/profile.py": 7,  # calls and kernels in a profile, torch's warning of a wait
    "validation/rows.py": 1,  # rows about NCCL
    "cli/doctor.py": 6,  # the option --nccl, its help and its conflicts
}
"""Number of uses that other files need."""


def uses(module):
    """Yield the identifiers and texts that name the accelerator. Docstrings do not count."""
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
        if ACCELERATOR.search(text):
            yield f"line {getattr(node, 'lineno', 0)}: {text}"


def test_one_file_names_the_accelerator():
    """A file that loses a use gets a lower count in ELSEWHERE."""
    differing = {}
    for path in FILES:
        file = path.relative_to(SOURCE).as_posix()
        file_uses = list(uses(tree(path)))
        if file != ACCELERATOR_FILE and len(file_uses) != ELSEWHERE.get(file, 0):
            differing[file] = file_uses
    assert not differing, f"use plait.cluster.accelerator: {differing}"
    assert all((SOURCE / file).is_file() for file in ELSEWHERE)


def test_uses_in_code_count_and_prose_does_not():
    text = '"""CUDA."""\nx = torch.cuda.is_available()  # CUDA\ny = "cuda:0"'
    assert len(list(uses(ast.parse(text)))) == 2
