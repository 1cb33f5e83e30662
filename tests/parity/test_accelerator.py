"""An Accelerate loop on Plait's layouts is the same loop in one process: losses, norms, rates, weights, evaluation, and what is resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.parity import adapted, trainers
from tests.parity.trainers import zero

MICRO, ACCUMULATION, CLIP, EPOCHS = 2, 2, 0.5, 2
DTYPE = torch.float64


def optimizer_of(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


def rates_of(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=9)


def one_process(dp, *, lora=False):
    """Plain PyTorch. A round has a batch for each of `dp` ranks, and a step has `ACCUMULATION` rounds; the last ones have fewer."""
    model = adapted.model(DTYPE) if lora else trainers.model(DTYPE)
    optimizer = optimizer_of(model)
    rates = rates_of(optimizer)
    batches = list(DataLoader(trainers.samples(), batch_size=MICRO))
    rounds = [batches[at : at + dp] for at in range(0, len(batches), dp)]
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    for _ in range(EPOCHS):
        model.train()
        for at in range(0, len(rounds), ACCUMULATION):
            for round_ in rounds[at : at + ACCUMULATION]:
                losses = [model(**batch).loss for batch in round_]
                found["losses"].append([loss.item() for loss in losses])
                (sum(losses) / (len(losses) * ACCUMULATION)).backward()
            found["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(dp):
                rates.step()
            found["rates"].append(rates.get_last_lr()[0])
    model.eval()
    with torch.no_grad():
        answers = [
            model(input_ids=batch["input_ids"]).logits[:, -1].argmax(-1) for batch in batches
        ]
    found["answers"] = torch.cat(answers).tolist()
    found["weights"] = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return found


def on_plait(rank, world, config, lora):
    """The same with `plait.hf.Accelerator`. Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Accelerator

        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=ACCUMULATION, plait_config=config
        )
        model = adapted.model(DTYPE) if lora else trainers.model(DTYPE)
        optimizer = optimizer_of(model)
        loaders = [DataLoader(trainers.samples(), batch_size=MICRO) for _ in range(2)]
        made = accelerator.prepare(loaders[0], model, optimizer, rates_of(optimizer), loaders[1])
        train, model, optimizer, rates, evaluation = made
        found: dict[str, Any] = {
            "losses": [],
            "norms": [],
            "rates": [],
            "index": accelerator.process_index,
        }
        for _ in range(EPOCHS):
            model.train()
            for batch in train:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        found["norms"].append(
                            float(accelerator.clip_grad_norm_(model.parameters(), CLIP))
                        )
                    optimizer.step()
                    rates.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        found["rates"].append(rates.get_last_lr()[0])
                found["losses"].append(accelerator.gather_for_metrics(loss).tolist())
        model.eval()
        answers = []
        for batch in evaluation:
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"]).logits
            answers.append(
                accelerator.gather_for_metrics({"answers": logits[:, -1].argmax(-1)})["answers"]
            )
        found["answers"] = torch.cat(answers).tolist()
        found["objects"] = [
            accelerator.gather_for_metrics([accelerator.process_index], use_gather_object=True)
            for _ in evaluation
        ]
        found["weights"] = accelerator.get_state_dict(accelerator.unwrap_model(model))
        accelerator.free_memory()
        return found


@pytest.mark.parametrize(
    ("world", "dp", "config", "lora"),
    [
        pytest.param(2, 2, zero(3), False, id="zero3"),
        pytest.param(2, 1, {"parallel": {"tp": 2}}, False, id="tp2"),
        pytest.param(2, 2, None, False, id="replicas"),
        *(
            pytest.param(2, 2, zero(stage), False, id=f"zero{stage}", marks=pytest.mark.proof)
            for stage in (1, 2)
        ),
        pytest.param(
            2,
            1,
            {"parallel": {"tp": 2, "sequence_parallel": True}},
            False,
            id="sp2",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            4, 2, {"parallel": {"tp": 2}, **zero(3)}, False, id="tp2-zero3", marks=pytest.mark.proof
        ),
        pytest.param(2, 2, zero(3), True, id="zero3-lora", marks=pytest.mark.proof),
        pytest.param(2, 1, {"parallel": {"tp": 2}}, True, id="tp2-lora", marks=pytest.mark.proof),
    ],
)
def test_a_layout_is_one_process(pool, world, dp, config, lora):
    """21 samples, of which the last round has too few for all ranks."""
    wanted = one_process(dp, lora=lora)
    ranks = pool.run(world, on_plait, config, lora)
    for found in ranks:
        for key in ("norms", "rates"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-9), key
        assert len(found["losses"]) == len(wanted["losses"])
        for here, there in zip(found["losses"], wanted["losses"], strict=True):
            assert here == pytest.approx(there, rel=1e-9)
        assert found["answers"] == wanted["answers"] and len(found["answers"]) == trainers.SAMPLES
        assert found["objects"][-1] == [0] and found["index"] < dp
    for name, tensor in wanted["weights"].items():
        torch.testing.assert_close(
            ranks[0]["weights"][name],
            tensor,
            rtol=1e-9,
            atol=1e-11,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert all(not found["weights"] for found in ranks[1:])


class Counted:
    """Of the user."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def resumed(rank, world, config, folder, save, seedable):
    """Two epochs in a random order. With `save` a checkpoint is written in the second, after which losses are counted; without, they begin
    there. Runs in a worker."""
    with trainers.launched(rank, world):
        from accelerate.utils import DataLoaderConfiguration

        from plait.hf import Accelerator

        torch.manual_seed(5 if save else 99)
        data = DataLoaderConfiguration(
            use_seedable_sampler=seedable, data_seed=4 if seedable else None
        )
        accelerator = Accelerator(
            cpu=True,
            plait_config=config,
            dataloader_config=data,
            step_scheduler_with_optimizer=False,
        )
        model = trainers.model(DTYPE)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = DataLoader(trainers.samples(16), batch_size=2, shuffle=True)
        loader, model, optimizer, rates = accelerator.prepare(
            loader, model, optimizer, rates_of(optimizer)
        )
        counted = Counted()
        accelerator.register_for_checkpointing(counted)
        losses: list[float] = []

        def epoch(batches, *, stop=None):
            for index, batch in enumerate(batches):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
                counted.seen += 1
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                if index == stop:
                    accelerator.save_state(folder)
                    losses.clear()

        if save:
            epoch(loader)
            epoch(loader, stop=1)
        else:
            accelerator.load_state(folder)
            epoch(accelerator.skip_first_batches(loader, 2))
        epoch(loader)
        accelerator.free_memory()
        return losses, counted.seen


@pytest.mark.parametrize(
    ("first", "then", "seedable"),
    [
        pytest.param((2, zero(3)), (2, zero(1)), False, id="zero3-to-zero1"),
        pytest.param(
            (2, zero(2)),
            (4, {"parallel": {"tp": 2}, **zero(3)}),
            True,
            id="zero2-to-tp2-zero3-seedable",
            marks=pytest.mark.proof,
        ),
    ],
)
def test_resume_in_mid_epoch(pool, tmp_path, first, then, seedable):
    """Another seed of the process, the same order of the samples; schedule and objects of the user go on."""
    wanted, seen = pool.run(first[0], resumed, first[1], str(tmp_path), True, seedable)[0]
    for found, seen_again in pool.run(then[0], resumed, then[1], str(tmp_path), False, seedable):
        assert len(wanted) == 2 + 4 and seen == seen_again == 12
        assert found == pytest.approx(wanted, rel=1e-9)
