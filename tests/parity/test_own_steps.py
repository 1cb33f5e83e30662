"""A Trainer whose class has a `training_step` or a `compute_loss` of its own."""

import pytest
import torch.nn.functional as F

from plait.errors import InputError
from plait.hf.transformers_trainer import warnings_about_loss
from tests.covers import proof_after
from tests.parity import trainers
from tests.parity.trainers import zero


def loss_of(model, inputs, reduction):
    """Cross-entropy of the next token."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    labels = inputs["labels"][:, 1:].flatten()
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels, ignore_index=-100, reduction=reduction
    )


def trainer_class(kind, base):
    """A class of a script, over Transformers' Trainer or Plait's."""

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
            return (
                loss_of(model, inputs, "sum") / num_items_in_batch * self.accelerator.num_processes
            )

    class Logged(base):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    class Distilled(base):
        def compute_loss(self, model, inputs, *args, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss + loss_of(model, inputs, "sum") / num_items_in_batch

    class DistilledByHelper(base):
        def term(self, model, inputs, num_items_in_batch):
            found = loss_of(model, inputs, "sum")
            found /= num_items_in_batch
            return found

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

    return locals()[kind]


def history_of(kind, base, arguments, folder, **settings):
    """What a run logs."""
    given = trainers.arguments(arguments, folder, **settings)
    trainer = trainer_class(kind, base)(
        model=trainers.model(), args=given, train_dataset=trainers.samples()
    )
    trainer.train()
    return trainers.history(trainer)


def on_plait(rank, world, kind, config, folder, steps):
    """Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return history_of(
            kind,
            Trainer,
            TrainingArguments,
            folder,
            deepspeed=config,
            gradient_accumulation_steps=steps,
        )


def native(kind, folder):
    """Transformers' own, in one process."""
    from transformers import Trainer, TrainingArguments

    with trainers.launched_alone():
        return history_of(kind, Trainer, TrainingArguments, folder, gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    ("kind", "config", "steps"),
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
def test_own_steps_are_one_process(pool, tmp_path, kind, config, steps):
    """In the last step, micro-batches differ in what they count, and a mean over means follows who has which."""
    wanted = native(kind, str(tmp_path))
    for found in pool.run(2, on_plait, kind, config, str(tmp_path), steps):
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-5), key


def refused_in_a_pipeline(rank, world, folder):
    """Runs in a worker."""
    with pytest.raises(InputError) as raised:
        on_plait(rank, world, "Twice", {"parallel": {"pp": 2}}, folder, 4)
    return str(raised.value)


def test_an_own_backward_in_a_pipeline(pool, tmp_path):
    for text in pool.run(2, refused_in_a_pipeline, str(tmp_path)):
        assert "Twice.training_step" in text and "call super().training_step" in text


WARNED = ("Mean", "Divided", "Distilled", "DistilledByHelper")
UNWARNED = ("DeclaredMean", "DividedForRanks", "Logged", "Super", "DistilledForRanks", "Passed")


@pytest.mark.parametrize("wraps", [False, True], ids=["subclass", "wrap"])
def test_cautions_about_losses(wraps):
    """Those whose scale follows the layout, and no other."""
    import transformers

    import plait.hf

    found = {}
    for kind in (*WARNED, *UNWARNED):
        base = transformers.Trainer if wraps else plait.hf.Trainer
        made = trainer_class(kind, base)
        made = plait.hf.wrap(made) if wraps else made
        trainer = made.__new__(made)
        trainer.model_accepts_loss_kwargs = True
        found[kind] = " ".join(warnings_about_loss(trainer, ranks=2, accumulation=4))
        assert not warnings_about_loss(trainer, ranks=1, accumulation=1)
    assert (
        "Mean.compute_loss does not read num_items_in_batch" in found["Mean"]
        and "4 micro-batches" in found["Mean"]
    )
    assert (
        "multiplied by self.accelerator.num_processes" in found["Divided"]
        and "2 times smaller" in found["Divided"]
    )
    for kind in ("Distilled", "DistilledByHelper"):
        assert "multiply the term by self.accelerator.num_processes" in found[kind]
        assert "2 times smaller" in found[kind]
    assert not any(found[kind] for kind in UNWARNED), found
