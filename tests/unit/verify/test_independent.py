"""The reference that shares no code with Plait is right, and sees mistakes in shared code."""

import math
import re
from itertools import chain
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
    """A tied model with a branch that a batch may leave unused."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.side = nn.Linear(6, 6)
        self.head = nn.Linear(6, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask, side=False):
        hidden = self.embed(input_ids).cumsum(1) * attention_mask[..., None]
        return SimpleNamespace(logits=self.head(hidden + self.side(hidden) if side else hidden))


def weights_of(model):
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def training_steps():
    """Return four steps of two micro-batches. One step has no targets, and one uses the branch."""
    micro_batch = token_batches(vocabulary=17, first="input_ids", mask="attention_mask")
    generator = torch.Generator().manual_seed(3)
    steps = [[micro_batch(3, generator) for _ in range(2)] for _ in range(4)]
    for batch in (steps[0][1], *steps[1]):
        batch["labels"].fill_(-100)
    steps[2][0]["side"] = True
    return steps


def backward_of_torch(model, batches):
    """Run the backward of the mean loss of a step. Return the loss, NaN without targets."""
    total = torch.zeros((), dtype=torch.float64)
    targets = 0
    for batch in batches:
        labels = batch.pop("labels")[:, 1:].flatten()
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        targets += int((labels != -100).sum())
    (total / max(targets, 1)).backward()
    return float(total) / targets if targets else math.nan


@pytest.mark.parametrize("clipping", [0.0, 0.3])
def test_the_reference_computes_what_torch_does(clipping):
    """Cross entropy, clipping and AdamW are those of torch."""
    model = Model().double()
    weights = weights_of(model)
    result = train(Model().double(), weights, training_steps(), optimizer=ADAMW, clipping=clipping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for index, batches in enumerate(training_steps()):
        loss = backward_of_torch(model, batches)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clipping or math.inf)
        assert result.norms[index] == pytest.approx(float(norm), rel=1e-12, abs=1e-300)
        assert result.losses[index] == pytest.approx(loss, rel=1e-12, nan_ok=True)
        for name, parameter in model.named_parameters():
            gradient = result.gradients[index][name]
            is_unused = name.startswith("side") and index != 2
            assert (gradient is None) == (parameter.grad is None) == is_unused
            if gradient is not None:
                expected = parameter.grad.numpy()
                np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-14)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        expected = parameter.detach().numpy()
        np.testing.assert_allclose(result.parameters[name], expected, rtol=1e-10, atol=1e-13)


def test_other_weights_are_refused():
    weights = weights_of(Model())
    for changed, message in (
        ({"head.bias": np.zeros(17)}, r"1 parameter names .* head.bias"),
        ({"side.bias": np.zeros(5)}, r"side.bias has shape \(6,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            train(Model(), {**weights, **changed}, [], optimizer=ADAMW, clipping=0)


def test_batches_are_padded_on_both_sides():
    """Lengths and numbers of targets differ."""
    lengths = set()
    targets = set()
    ends = set()
    for batch in chain(*training_steps()):
        mask = batch["attention_mask"]
        lengths.add(mask.shape[1])
        targets.add(int(mask.sum()))
        ends |= set(map(tuple, mask[:, [0, -1]].bool().tolist()))
        assert int(mask.sum(1).min()) >= 3
    assert ends == {(True, True), (True, False), (False, True)}
    assert len(lengths) > 2 and len(targets) > 4


FIELDS = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FILE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "model": {"config": FIELDS},
}


def plan_of(**changes):
    config = load({**FILE, **changes})
    return prepare(config, model=None, processes=1, most_processes=1, steps=2, passes=("float64",))


def one_process(plan):
    """Return the trace that Plait's functions compute in this process."""
    built = plan.build(torch.float64)
    model = initialise_weights(built.model, blocks=(), seed=plan.resolved.seed)
    with plan.pass_context("float64", model):
        # The public functions start processes.
        return run._trace(plan, built, model, plan.data(built), ReferenceNumerics())


def sections_of(plan):
    """Return the reports of the shared and of the independent reference on one computation."""
    actual = one_process(plan)
    second, unchecked = second_trace(plan, actual)
    shared = compare_float64(plan, one_process(plan), actual)
    return shared, compare_independent(plan, second, actual, unchecked=unchecked)


def kinds_and_steps(section):
    return {(row.kind, row.step) for row in section.rows}


def shifted_twice(batch):
    return F.pad(batch["labels"], (0, 2), value=-100)[..., 2:]


def without_decay(spec, named):
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)


def test_mistakes_in_shared_code_are_seen():
    """A wrong loss and a wrong optimizer are equal for a reference that shares them."""
    plan = plan_of()
    shared, separate = sections_of(plan)
    assert not shared.different and not separate.different
    kinds = {kind for kind, _ in kinds_and_steps(separate)}
    assert kinds == {"loss", "gradient norm", "gradient", "parameter"}

    with patch.object(plait.losses.loss.CausalLMLoss, "_targets", staticmethod(shifted_twice)):
        shared, separate = sections_of(plan)
    assert not shared.different and separate.different[0].kind == "loss"
    with patch.object(run, "build_optimizer", without_decay):
        shared, separate = sections_of(plan)
    assert not shared.different and separate.different
    # The gradients of the first step precede all updates.
    assert all(row.kind == "parameter" or row.step == 1 for row in separate.different)


def test_another_optimizer_is_compared_until_its_first_update():
    plan = plan_of(optimizer={"type": "SGD", "params": {"lr": 0.1}})
    _, section = sections_of(plan)
    assert not section.different
    assert kinds_and_steps(section) == {("loss", 0), ("gradient norm", 0), ("gradient", 0)}
    (note,) = section.notes
    assert note.startswith("compared: loss, norm and gradients of the first step; not compared: ")
    assert note.endswith("this reference only has AdamW, but the optimizer is SGD")


def test_settings_of_adamw_include_defaults():
    adam = {"type": "Adam", "params": {"torch_adam": True, "lr": "auto"}}
    assert adamw_of(OptimizerSpec()) == AdamW(1e-3, 0.9, 0.999, 1e-8, 0.0)
    assert adamw_of(OptimizerSpec(**adam)) == AdamW(5e-5, 0.9, 0.999, 1e-8, 0.01)
    for fields, reason in (
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "but the optimizer is Adam"),
        ({"type": "AdamW", "params": {"amsgrad": True}}, "does not support amsgrad"),
        ({"states": "int8"}, "int8"),
    ):
        assert reason in str(adamw_of(OptimizerSpec(**fields)))


def test_the_reference_imports_nothing_of_plait():
    imports = re.findall(r"(?m)^\s*(?:from|import) (\w+)", Path(independent.__file__).read_text())
    allowed = {"__future__", "collections", "dataclasses", "math", "numpy", "torch", "typing"}
    assert set(imports) <= allowed
