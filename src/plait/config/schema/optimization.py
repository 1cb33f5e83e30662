"""The optimizer and the schedule as a file names them: DeepSpeed's `optimizer` and `scheduler`
blocks.

Whatever is wrong with them without knowing the model is refused when they are made; nothing is
built here. What each type accepts is in the modules `optimizers` and `schedules`;
`plait.optim.optimizer` and `plait.optim.lr_schedules` build from these two.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, ValidationInfo, field_validator

from plait.config.schema import lr_schedules, optimizers
from plait.parallel.precision.optimizer_states import StateForm
from plait.policy import Policy


class OptimizerSpec(Policy):
    """Which optimizer, and its parameters."""

    type: str = "AdamW"
    """`AdamW`, `Adam` (DeepSpeed's: AdamW unless `adam_w_mode` is false), `SGD`, `Adagrad`, `Lion`
    (from lion-pytorch), `Muon`, any other name in `torch.optim`, or a class by its path
    (`torchao.optim.AdamW8bit`).
    """
    states: StateForm | None = None
    """Adam and AdamW: the dtype of the two moments. Left out: that of the parameters, float32
    unless model.dtype sets another. bf16: the first in bfloat16, the second in float32. int8 and
    float8: both in 8 bits per element, with a scale for every block of up to 256; small parameters
    and vectors in float32. Steps are computed in float32.
    """
    params: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """Its parameters by name. `auto` for lr, betas, eps and weight_decay takes Hugging Face's
    defaults.
    """

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        kind = optimizers.canonical(value)
        _refuse(optimizers.kind_problems(kind))
        return kind

    @field_validator("params")
    @classmethod
    def _fit(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "type" not in info.data:  # the type itself was refused
            return value
        kind = info.data["type"]
        _refuse(
            optimizers.param_problems(kind, value)
            + optimizers.state_problems(kind, info.data.get("states"), value)
        )
        return {name: optimizers.convert(kind, name, given) for name, given in value.items()}

    def resolved(self) -> Self:
        """The same without `auto`."""
        params = {
            name: optimizers.AUTO[name] if given == "auto" else given
            for name, given in self.params.items()
        }
        return self.model_copy(update={"params": params})


class SchedulerSpec(Policy):
    """Which learning rate schedule, and its parameters."""

    type: str
    """DeepSpeed's `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `OneCycle` and `LRRangeTest`,
    Megatron-LM's as `MegatronLR`, Transformers' `linear`, `cosine`, `constant_with_warmup` and the
    like, or a name in `torch.optim.lr_scheduler`.
    """
    params: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """Its parameters by name. The length of the run, where it is `auto` or left out, is filled in
    by the run.
    """

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        _refuse(lr_schedules.kind_problems(value))
        return value

    @field_validator("params")
    @classmethod
    def _fit(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "type" not in info.data:
            return value
        kind = info.data["type"]
        _refuse(lr_schedules.param_problems(kind, value))
        return {name: lr_schedules.convert(kind, name, given) for name, given in value.items()}

    def resolved(self, *, learning_rate: float, total_steps: int | None) -> Self:
        """The same without `auto`: the optimizer's `learning_rate` and the `total_steps` of the run
        are filled in where they decide. With `total_steps` None, a length of the run stays as it
        is.
        """
        params = {
            name: (
                given
                if given != "auto"
                else self._auto(name, learning_rate=learning_rate, total_steps=total_steps)
            )
            for name, given in self.params.items()
        }
        return self.model_copy(update={"params": params})

    @staticmethod
    def _auto(name: str, *, learning_rate: float, total_steps: int | None) -> object:
        if name in lr_schedules.RUN_LENGTH:
            return "auto" if total_steps is None else total_steps
        if name == "warmup_max_lr":
            return learning_rate
        return lr_schedules.auto_value(name)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError(" Also: ".join(problems))
