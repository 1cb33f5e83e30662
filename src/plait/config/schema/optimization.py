"""DeepSpeed's `optimizer` and `scheduler` blocks: a type and its parameters.

Everything that can be checked without the model is checked when the blocks are parsed. Nothing is
built here: `optimizers` and `lr_schedules` know the parameters of each type, and
`plait.optim.optimizer` and `plait.optim.lr_schedules` build from the blocks.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, ValidationInfo, field_validator

from plait.config.schema import lr_schedules, optimizers
from plait.parallel.precision.optimizer_states import StateForm
from plait.policy import Policy


class OptimizerSpec(Policy):
    """Optimizer and its parameters."""

    type: str = "AdamW"
    """Type of the optimizer: `AdamW`, `Adam` (DeepSpeed's: AdamW unless `adam_w_mode` is false),
    `SGD`, `Adagrad`, `Lion` (from lion-pytorch), `Muon`, any other name in `torch.optim`, or the
    path of a class (`torchao.optim.AdamW8bit`).
    """
    states: StateForm | None = None
    """Adam and AdamW: dtype of the two moments. If omitted, the dtype of the parameters, which is
    float32 unless model.dtype sets another. bf16: the first moment in bfloat16, the second in
    float32. int8 and float8: both in 8 bits per element, with a scale for every block of up to 256;
    small parameters and vectors in float32. Steps are computed in float32.
    """
    params: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """Parameters of the optimizer, by name. `auto` for lr, betas, eps and weight_decay selects
    Hugging Face's defaults.
    """

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        kind = optimizers.canonical_type(value)
        _raise_problems(optimizers.kind_problems(kind))
        return kind

    @field_validator("params")
    @classmethod
    def _check_params(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        # pydantic leaves a field that was refused out of `info.data`.
        if "type" not in info.data:
            return value
        kind = info.data["type"]
        _raise_problems(
            optimizers.param_problems(kind, value)
            + optimizers.state_problems(kind, info.data.get("states"), value)
        )
        return {name: optimizers.convert(kind, name, param) for name, param in value.items()}

    def resolved(self) -> Self:
        """Return a copy in which defaults replace `auto`."""
        params = {
            name: optimizers.AUTO[name] if value == "auto" else value
            for name, value in self.params.items()
        }
        return self.model_copy(update={"params": params})


class SchedulerSpec(Policy):
    """Learning rate schedule and its parameters."""

    type: str
    """Type of the schedule: DeepSpeed's `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `OneCycle`
    and `LRRangeTest`, Megatron-LM's as `MegatronLR`, Transformers' `linear`, `cosine`,
    `constant_with_warmup` and others, or a name in `torch.optim.lr_scheduler`.
    """
    params: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """Parameters of the schedule, by name. The length of the run replaces a number of total steps
    that is `auto` or omitted.
    """

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        _raise_problems(lr_schedules.kind_problems(value))
        return value

    @field_validator("params")
    @classmethod
    def _check_params(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        # pydantic leaves a field that was refused out of `info.data`.
        if "type" not in info.data:
            return value
        kind = info.data["type"]
        _raise_problems(lr_schedules.param_problems(kind, value))
        return {name: lr_schedules.convert(kind, name, param) for name, param in value.items()}

    def resolved(self, *, learning_rate: float, total_steps: int | None) -> Self:
        """Return a copy in which values replace `auto`.

        Args:
            learning_rate: Learning rate of the optimizer.
            total_steps: Optimizer steps of the run. If None, the length of the run stays `auto`.
        """
        length = "auto" if total_steps is None else total_steps
        values: dict[str, Any] = dict.fromkeys(lr_schedules.RUN_LENGTH, length)
        values["warmup_max_lr"] = learning_rate
        params = {}
        for name, value in self.params.items():
            if value == "auto":
                value = values[name] if name in values else lr_schedules.auto_value(name)
            params[name] = value
        return self.model_copy(update={"params": params})


def _raise_problems(problems: list[str]) -> None:
    """Raise ValueError with all problems. `resolve` splits the text again at " Also: "."""
    if problems:
        raise ValueError(" Also: ".join(problems))
