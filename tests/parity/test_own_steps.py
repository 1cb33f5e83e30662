"""Trainers whose class overrides `training_step` or `compute_loss`."""

import pytest
import torch.nn.functional as F

from plait.errors import InputError
from plait.hf.transformers_trainer import warnings_about_loss
from tests.covers import proof_after
from tests.parity import trainers
from tests.parity.trainers import zero


def loss_of(model, inputs, reduction):
    """Return the cross-entropy of the next token. Labels of -100 do not count."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    labels = inputs["labels"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction=reduction)


def trainer_class(name, base):
    """Return a class as scripts have them, based on Transformers' Trainer or Plait's."""

    class Mean(base):
        def compute_loss(self, model, inputs, *_, num_items_in_batch=None):
            return loss_of(model, inputs, "mean")

    class DeclaredMean(Mean):
        loss_is_scaled_for_ga = False

    class Divided(base):
        def compute_loss(self, model, inputs, *_, num_items_in_batch=None):
            return loss_of(model, inputs, "sum") / num_items_in_batch

    class DividedForRanks(base):
        def compute_loss(self, model, inputs, *_, num_items_in_batch=None):
            loss = loss_of(model, inputs, "sum") / num_items_in_batch
            return loss * self.accelerator.num_processes

    class Logged(base):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    class Distilled(base):
        def compute_loss(self, model, inputs, *args, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss + loss_of(model, inputs, "sum") / num_items_in_batch

    class DistilledByHelper(base):
        def term(self, model, inputs, num_items_in_batch):
            loss = loss_of(model, inputs, "sum")
            loss /= num_items_in_batch
            return loss

        def compute_loss(self, model, inputs, *args, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss + self.term(model, inputs, num_items_in_batch)

    class DistilledForRanks(base):
        def compute_loss(self, model, inputs, *args, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            term = loss_of(model, inputs, "sum") / num_items_in_batch
            return loss + term * self.accelerator.num_processes

    class Passed(base):
        def compute_loss(self, model, inputs, *args, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss / 2 if num_items_in_batch is None else loss

    class Twice(base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            first = self.compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(first)
            second = 0.5 * self.compute_loss(
                model, dict(inputs), num_items_in_batch=num_items_in_batch
            )
            self.accelerator.backward(second)
            return (first + second).detach()

    class Super(base):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    # All classes are local variables.
    return locals()[name]


def history_of(name, base, arguments, folder, **settings):
    """Train, and return what is logged."""
    trainer = trainer_class(name, base)(
        model=trainers.model(),
        args=trainers.arguments(arguments, folder, **settings),
        train_dataset=trainers.samples(),
    )
    trainer.train()
    return trainers.history(trainer)


def train_on_plait(rank, world, name, config, folder, steps):
    """Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        settings = {"deepspeed": config, "gradient_accumulation_steps": steps}
        return history_of(name, Trainer, TrainingArguments, folder, **settings)


def train_with_transformers(name, folder):
    """Train in one process."""
    from transformers import Trainer, TrainingArguments

    with trainers.launched_alone():
        return history_of(name, Trainer, TrainingArguments, folder, gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    ("name", "config", "steps"),
    proof_after(
        4,
        [
            ("Twice", zero(3), 2),
            ("Super", {"parallel": {"pp": 2}}, 4),
            ("DistilledForRanks", zero(1), 2),
            ("DeclaredMean", zero(1), 2),
            ("Twice", zero(0), 2),
            ("Twice", {"parallel": {"tp": 2}}, 4),
            ("Super", zero(1), 2),
            ("DividedForRanks", zero(1), 2),
        ],
    ),
)
def test_own_steps_are_one_process(pool, tmp_path, name, config, steps):
    """Micro-batches of the last step have different numbers of targets."""
    expected = train_with_transformers(name, str(tmp_path))
    for history in pool.run(2, train_on_plait, name, config, str(tmp_path), steps):
        for key in ("loss", "grad_norm"):
            assert history[key] == pytest.approx(expected[key], rel=1e-5), key


def own_backward_in_a_pipeline(rank, world, folder):
    """Return the message of the refusal. Runs on every rank."""
    with pytest.raises(InputError) as error:
        train_on_plait(rank, world, "Twice", {"parallel": {"pp": 2}}, folder, 4)
    return str(error.value)


def test_an_own_backward_in_a_pipeline_is_refused(pool, tmp_path):
    for message in pool.run(2, own_backward_in_a_pipeline, str(tmp_path)):
        assert "Twice.training_step" in message
        assert "call super().training_step" in message


WARNED = ("Mean", "Divided", "Distilled", "DistilledByHelper")
UNWARNED = ("DeclaredMean", "DividedForRanks", "Logged", "Super", "DistilledForRanks", "Passed")


@pytest.mark.parametrize("wraps", [False, True], ids=["subclass", "wrap"])
def test_warnings_about_losses_that_depend_on_the_layout(wraps):
    import transformers

    import plait.hf

    warnings = {}
    for name in (*WARNED, *UNWARNED):
        if wraps:
            kind = plait.hf.wrap(trainer_class(name, transformers.Trainer))
        else:
            kind = trainer_class(name, plait.hf.Trainer)
        # The warnings depend on the class only.
        trainer = kind.__new__(kind)
        trainer.model_accepts_loss_kwargs = True
        warnings[name] = " ".join(warnings_about_loss(trainer, ranks=2, accumulation=4))
        assert not warnings_about_loss(trainer, ranks=1, accumulation=1)

    assert "Mean.compute_loss does not read num_items_in_batch" in warnings["Mean"]
    assert "4 micro-batches" in warnings["Mean"]
    assert "multiplied by self.accelerator.num_processes" in warnings["Divided"]
    assert "2 times smaller" in warnings["Divided"]
    for name in ("Distilled", "DistilledByHelper"):
        assert "multiply the term by self.accelerator.num_processes" in warnings[name]
        assert "2 times smaller" in warnings[name]
    for name in UNWARNED:
        assert not warnings[name], name
