"""Context parallelism over all-gathered keys and values, for a Llama: the technique of docs/how-to/add-a-technique.md.

Every rank of the cp axis has a part of each sequence. All layers but attention compute with a position's own hidden state; attention
gathers the keys and values of all positions. A parameter's gradient is then the sum over the parts.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface

from plait._torch.tensors import local_tensor
from plait.cluster.mesh import Mesh
from plait.comm.collectives import gather_sum, shard_range
from plait.errors import ConfigError, InputError, ModelError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger, gradient_bytes
from plait.parallel.hooks import StepHook
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.data_parallel import DataParallel


class ContextParallel(Technique):
    """Splits sequences over the cp axis."""

    batch_axes: ClassVar[tuple[str, ...]] = ("cp",)
    sequence_length: int
    """Tokens of every sequence, before it is cut."""

    def check(self, context: TechniqueContext) -> None:
        """Raise ConfigError or ModelError for what this technique does not do."""
        cp, length = context.layout.cp, self.sequence_length
        if length % cp:
            raise ConfigError(
                Problem(
                    "parallel.cp",
                    cp,
                    f"a sequence has {length} tokens and {length} % {cp} != 0",
                    "use a divisor",
                )
            )
        if context.technique(DataParallel).update_in_backward:
            rule = "a parameter is updated in the backward, before its gradient is summed over cp"
            raise ConfigError(Problem("parallel.optimizer_in_backward", "true", rule, "use false"))
        config: Any = getattr(context.model, "config", None)
        if context.model is not None and getattr(config, "model_type", None) != "llama":
            raise ModelError(
                f"parallel.cp = {cp}: only the attention of a Llama is known here, not that of {type(context.model).__name__}"
            )

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Give the model its attention; Transformers then makes no mask."""
        if mesh.layout.cp > 1:
            group, model = mesh.group("cp"), parts.model

            def attend(
                module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
            ) -> tuple[torch.Tensor, None]:
                # [batch, heads, part of seq, head_dim]; the backward of a gathering sums what all parts give.
                length = query.shape[2] * mesh.layout.cp
                start, size = shard_range(length, group)
                key, value = (gather_sum(x, group, dim=2, length=length) for x in (key, value))
                at = torch.arange(length, device=query.device)
                causal = at[start : start + size, None] >= at
                out = F.scaled_dot_product_attention(
                    query, key, value, attn_mask=causal, scale=scaling, enable_gqa=True
                )
                return out.transpose(1, 2).contiguous(), None

            AttentionInterface.register("gathered", attend)
            model.set_attn_implementation("gathered")  # type: ignore[operator]
        return parts

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Cut every micro-batch; sum gradients over cp."""
        summed = [
            parameter
            for parameter in parts.model.parameters()
            if "cp" in parts.reduction(parameter).summed
        ]
        return [SequenceParts(self.sequence_length, summed, mesh)] if mesh.layout.cp > 1 else []

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Keys and values forward, their gradients backward, and the sum of the parameters' gradients."""
        n = ledger.cp
        kept = [p for p in facts.parameters if p.name.endswith(("k_proj.weight", "v_proj.weight"))]
        gathered = (
            ledger.accumulation
            * ledger.tokens
            * sum(p.shape[0] * p.itemsize for p in kept)
            * (n - 1)
            // n
        )
        ledger = ledger.add_traffic("all_gather", gathered).add_traffic("reduce_scatter", gathered)
        return ledger.add_traffic("all_reduce", 2 * gradient_bytes(facts, ledger) * (n - 1) // n)


class SequenceParts(StepHook):
    """This rank's part of every sequence, and of every gradient."""

    def __init__(self, length: int, parameters: list[torch.nn.Parameter], mesh: Mesh) -> None:
        self.length, self.parameters, self.group = length, parameters, mesh.group("cp")

    def transform(self, batch: Any) -> Any:
        """Labels are shifted and positions written already."""
        if batch["input_ids"].shape[1] != self.length or batch.get("attention_mask") is not None:
            raise InputError(
                f"parallel.cp: a batch has `input_ids` [batch, {self.length}] and no attention_mask"
            )
        start, size = shard_range(self.length, self.group)
        return {name: entry.narrow(1, start, size) for name, entry in batch.items()}

    def finish_reduction(self) -> None:
        """After the sums over data-parallel ranks."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                dist.all_reduce(local_tensor(parameter.grad), group=self.group)
