"""The reference that shares no code: right by itself, and it sees mistakes that both sides of the other comparison make."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait.losses.loss
from plait.config.resolving.resolve import load
from plait.config.schema.optimization import OptimizerSpec
from plait.verify import independent, run
from plait.verify.independent import AdamW, train
from plait.verify.model_under_test import initialise_weights, token_batches
from plait.verify.parity import ReferenceNumerics
from plait.verify.plan import prepare
from plait.verify.report import compare_float64, compare_independent
from plait.verify.run import adamw_of, second_trace

ADAMW = AdamW(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)


class Model(nn.Module):
    """Tied, with a branch that a batch may leave unused."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.side = nn.Linear(6, 6)
        self.head = nn.Linear(6, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask, side=False):
        hidden = self.embed(input_ids).cumsum(1) * attention_mask[..., None]
        return SimpleNamespace(logits=self.head(hidden + self.side(hidden) if side else hidden))


def steps():
    micro_batch = token_batches(vocabulary=17, first="input_ids", mask="attention_mask")
    generator = torch.Generator().manual_seed(3)
    made = [[micro_batch(3, generator) for _ in range(2)] for _ in range(4)]
    made[0][1]["labels"].fill_(-100)
    for batch in made[1]:
        batch["labels"].fill_(-100)
    made[2][0]["side"] = True
    return made


@pytest.mark.parametrize("clipping", [0.0, 0.3])
def test_it_is_what_torch_computes(clipping):
    """torch's cross entropy, clipping and AdamW agree. A step without targets has no loss, and an unused layer no gradient."""
    model = Model().double()
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    result = train(Model().double(), weights, steps(), optimizer=ADAMW, clipping=clipping)
    update = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for index, step in enumerate(steps()):
        total, targets = torch.zeros((), dtype=torch.float64), 0
        for batch in step:
            labels = batch.pop("labels")[:, 1:].flatten()
            logits = model(**batch).logits[:, :-1].flatten(0, 1)
            total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            targets += int((labels != -100).sum())
        (total / max(targets, 1)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clipping or math.inf)
        assert result.norms[index] == pytest.approx(float(norm), rel=1e-12, abs=1e-300)
        loss = float(total) / targets if targets else math.nan
        assert result.losses[index] == pytest.approx(loss, rel=1e-12, nan_ok=True)
        for name, parameter in model.named_parameters():
            gradient = result.gradients[index][name]
            is_unused = name.startswith("side") and index != 2
            assert (gradient is None) == (parameter.grad is None) == is_unused
            if gradient is not None:
                right = parameter.grad.numpy()
                np.testing.assert_allclose(gradient, right, rtol=1e-10, atol=1e-14)
        update.step()
        update.zero_grad()
    for name, parameter in model.named_parameters():
        right = parameter.detach().numpy()
        np.testing.assert_allclose(result.parameters[name], right, rtol=1e-10, atol=1e-13)


def test_other_weights_are_refused():
    weights = {name: p.detach().numpy() for name, p in Model().named_parameters()}
    with pytest.raises(ValueError, match=r"1 parameter names .* head.bias"):
        train(Model(), {**weights, "head.bias": np.zeros(17)}, [], optimizer=ADAMW, clipping=0)
    with pytest.raises(ValueError, match=r"side.bias has shape \(6,\)"):
        train(Model(), {**weights, "side.bias": np.zeros(5)}, [], optimizer=ADAMW, clipping=0)


def test_batches_are_padded_on_both_sides():
    """Rows have full length, or padding on the left or on the right. Lengths and numbers of targets differ."""
    masks = [batch["attention_mask"] for step in steps() for batch in step]
    kinds = {(bool(row[0]), bool(row[-1])) for mask in masks for row in mask}
    assert kinds == {(True, True), (True, False), (False, True)}
    assert len({mask.shape[1] for mask in masks}) > 2
    assert len({int(mask.sum()) for mask in masks}) > 4
    assert all(int(row.sum()) >= 3 for mask in masks for row in mask)


FIELDS = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
FILE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "model": {"config": FIELDS},
}


def planned(**changes):
    config = load({**FILE, **changes})
    return prepare(config, model=None, processes=1, most_processes=1, steps=2, passes=("float64",))


def one_process(plan):
    """Return the trace that Plait's functions compute in this process."""
    built = plan.build(torch.float64)
    model = initialise_weights(built.model, blocks=(), seed=plan.resolved.seed)
    with plan.pass_context("float64", model):
        return run._trace(plan, built, model, plan.data(built), ReferenceNumerics())


def sections_of(plan):
    """Return the reports of the two references on the same computation."""
    found = one_process(plan)
    second, unchecked = second_trace(plan, found)
    shared = compare_float64(plan, one_process(plan), found)
    return shared, compare_independent(plan, second, found, unchecked=unchecked)


def _shifted_twice(batch):
    return F.pad(batch["labels"], (0, 2), value=-100)[..., 2:]


def _without_decay(spec, named):
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)


def test_mistakes_in_shared_code_are_seen():
    """A loss that predicts the wrong token and a wrong optimizer are equal for a reference that shares them."""
    plan = planned()
    shared, independently = sections_of(plan)
    assert not shared.different and not independently.different
    kinds = {row.kind for row in independently.rows}
    assert kinds == {"loss", "gradient norm", "gradient", "parameter"}
    with patch.object(plait.losses.loss.CausalLMLoss, "_targets", staticmethod(_shifted_twice)):
        shared, independently = sections_of(plan)
        assert not shared.different and independently.different[0].kind == "loss"
    with patch.object(run, "build_optimizer", _without_decay):
        shared, independently = sections_of(plan)
        assert not shared.different and independently.different
        # the first step's gradients are those before any update
        assert all(row.kind == "parameter" or row.step == 1 for row in independently.different)


def test_what_is_not_judged_is_said():
    """Another optimizer is judged up to its first gradients. Settings of AdamW are judged by their meaning, defaults included."""
    plan = planned(optimizer={"type": "SGD", "params": {"lr": 0.1}})
    _, section = sections_of(plan)
    assert not section.different
    assert {row.kind for row in section.rows} == {"loss", "gradient norm", "gradient"}
    assert {row.step for row in section.rows} == {0}
    note = "compared: loss, norm and gradients of the first step; not compared: everything after it, because this reference only has AdamW, but the optimizer is SGD"
    assert section.notes == (note,)
    for fields, expected in (
        ({}, independent.AdamW(1e-3, 0.9, 0.999, 1e-8, 0.0)),
        ({"type": "Adam", "params": {"torch_adam": True, "lr": "auto"}}, independent.AdamW(5e-5, 0.9, 0.999, 1e-8, 0.01)),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "this reference only has AdamW, but the optimizer is Adam"),
        ({"type": "AdamW", "params": {"amsgrad": True}}, "this reference does not support amsgrad"),
    ):  # fmt: skip
        assert adamw_of(OptimizerSpec(**fields)) == expected
    assert "int8" in str(adamw_of(OptimizerSpec(states="int8")))


def test_the_file_imports_nothing_of_plait():
    """The reference cannot be made of the code that it judges."""
    imports = re.findall(r"(?m)^\s*(?:from|import) (\w+)", Path(independent.__file__).read_text())
    allowed = {"__future__", "collections", "dataclasses", "math", "numpy", "torch", "typing"}
    assert set(imports) <= allowed
