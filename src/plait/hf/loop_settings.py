"""A configuration of Plait for an Accelerate loop, with what the Accelerator's arguments say."""

from __future__ import annotations

from typing import Any

from plait.cluster.topology import launchers_variable
from plait.config.resolving.batch import ACCUMULATION, MICRO, TRAIN
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.config.schema.config import Bf16Section, Config, Fp16Section
from plait.errors import ConfigError, InputError, Problem, refuse
from plait.hf.settings import ConfigSource, tracker_problems

PRECISIONS = ("no", "bf16", "fp16")


def precision_of(asked: str | None) -> str:
    """The argument `mixed_precision`, else what `accelerate launch` set. Raises InputError for one
    that Plait does not have.
    """
    found = (
        str(asked).lower()
        if asked is not None
        else launchers_variable("ACCELERATE_MIXED_PRECISION", "no")
    )
    if found not in PRECISIONS:
        raise InputError(
            f"plait.hf.Accelerator(mixed_precision={found!r}): Plait computes in"
            f" {', '.join(PRECISIONS)}; use one of them"
        )
    return found


def checked_config(source: ConfigSource | None, *, precision: str, accumulation: int) -> Config:
    """The file, where it says nothing as the arguments say. Raises ConfigError where they
    contradict each other, and for what a loop with `accelerator.backward(loss)` cannot run.
    """
    config = load(source if source is not None else {})
    update: dict[str, Any] = {}
    problems = []
    written = {
        name: getattr(config, name).enabled
        for name in ("bf16", "fp16")
        if config.origin(f"{name}.enabled") != "default"
    }
    if not written:
        update = {
            "bf16": Bf16Section(enabled=precision == "bf16"),
            "fp16": Fp16Section(enabled=precision == "fp16"),
        }
    if config.origin("gradient_clipping") == "default":
        update["gradient_clipping"] = 0.0  # accelerator.clip_grad_norm_ says
    for name, value in written.items():
        if precision != "no" and value not in ("auto", precision == name):
            problems.append(_contradiction(f"{name}.enabled", value, "mixed_precision", precision))
    if config.gradient_accumulation_steps is None:
        update[ACCUMULATION] = accumulation
    elif config.gradient_accumulation_steps not in ("auto", accumulation):
        problems.append(
            _contradiction(
                ACCUMULATION,
                config.gradient_accumulation_steps,
                "gradient_accumulation_steps",
                accumulation,
            )
        )
    for name, given in (
        ("optimizer", "optimizer, ..."),
        ("scheduler", "optimizer, scheduler, ..."),
    ):
        if getattr(config, name) is not None:
            rule = f"the loop gives its own, accelerator.prepare(model, {given})"
            problems.append(
                Problem(name, getattr(config, name).type, rule, "leave it out of the configuration")
            )
    refuse(problems)
    return config.model_copy(update=update).with_provenance(config.provenance)


def resolved_of(
    config: Config,
    *,
    world_size: int,
    precision: str,
    accumulation: int,
    micro: int,
    hidden_size: int | None,
) -> Resolved:
    """`config` with nothing open. `micro`: samples of the loader's batches. Raises ConfigError."""
    auto = {
        MICRO: micro,
        ACCUMULATION: accumulation,
        TRAIN: None,
        "gradient_clipping": 0.0,
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
    }
    resolved = resolve(
        config, world_size=world_size, hidden_size=hidden_size, micro_batch_size=micro, auto=auto
    )
    refuse(_unfit(resolved))
    return resolved


def _contradiction(path: str, here: Any, argument: str, there: Any) -> Problem:
    return Problem(
        path,
        here,
        f"Accelerator({argument}={there!r}) decides it too",
        'write "auto" in the file, or the same in both',
    )


def _unfit(resolved: Resolved) -> list[Problem]:
    layout = resolved.layout
    found = []
    rules = {
        "pp": (
            layout.pp,
            "a pipeline has no loss to call accelerator.backward on",
            "sharded.forward_backward of plait.parallelize",
        ),
        "cp": (
            layout.cp,
            "the loop gives the model its batch as it is, and no process has all of a sequence",
            "engine.train_batch",
        ),
        "ep": (
            layout.ep,
            "your own training loop with experts on different processes is not proven",
            "engine.train_batch",
        ),
    }
    for axis, (degree, rule, instead) in rules.items():
        if degree > 1:
            found.append(
                Problem(f"parallel.{axis}", degree, rule, f"use 1, plait.hf.Trainer, or {instead}")
            )
    argument = 'write Accelerator(log_with="{name}")'
    rule = "the loop records its own numbers with accelerator.log"
    csv = "write the numbers of the loop to a file"
    found += tracker_problems(resolved, rule, argument, csv=csv)
    if resolved.data_parallel.update_in_backward:
        rule = "the loop clips and steps between the backward and the update"
        found.append(Problem("parallel.optimizer_in_backward", True, rule, "use false"))
    if resolved.loss_chunk_tokens:
        rule = (
            "only plait.causal_lm_loss is computed in chunks, and the loop computes its loss itself"
        )
        found.append(
            Problem(
                "parallel.loss_chunk_tokens",
                resolved.loss_chunk_tokens,
                rule,
                "use 0, or call plait.chunked_causal_lm_loss",
            )
        )
    for name, value, none in (
        ("z_loss", resolved.routing.z_loss, 0.0),
        ("balance", resolved.routing.balance, "micro_batch"),
    ):
        if value != none:
            rule = "Plait adds it to plait.causal_lm_loss, and the loop computes its loss itself"
            found.append(
                Problem(f"experts.{name}", value, rule, f"use {none}, or engine.train_batch")
            )
    return found


def refuse_another_clipping(config: Config, asked: float) -> None:
    """Refuse a norm that contradicts the file's. Raises ConfigError."""
    if config.gradient_clipping not in ("auto", 0, asked):
        rule = f"accelerator.clip_grad_norm_ was called with {asked}, and both decide it"
        raise ConfigError(
            Problem("gradient_clipping", config.gradient_clipping, rule, "leave one of them out")
        )
