"""The technique of docs/how-to/add-a-technique.md: context parallelism for a Llama.

Every rank of the cp axis has a part of each sequence. Attention gathers the keys and values of all
positions, and all other layers compute each position by itself. The gradient of a parameter is then
the sum over the parts.
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
    """Number of tokens of every sequence before it is cut."""

    def check(self, context: TechniqueContext) -> None:
        """Raise ConfigError or ModelError for settings that this technique does not support."""
        cp = context.layout.cp
        length = self.sequence_length
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
            raise ConfigError(Problem("parallel.optimizer_in_backward", True, rule, "use false"))
        config: Any = getattr(context.model, "config", None)
        if context.model is not None and getattr(config, "model_type", None) != "llama":
            raise ModelError(
                f"parallel.cp = {cp}: only the attention of a Llama is known here,"
                f" not that of {type(context.model).__name__}"
            )

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Replace the attention of the model. Transformers then creates no mask."""
        if mesh.layout.cp == 1:
            return parts
        group = mesh.group("cp")

        def attend(
            module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
        ) -> tuple[torch.Tensor, None]:
            # The inputs are [batch, heads, tokens of this rank, head_dim].
            length = query.shape[2] * mesh.layout.cp
            start, size = shard_range(length, group)
            # The backward of gather_sum sums the gradients of all ranks.
            key = gather_sum(key, group, dim=2, length=length)
            value = gather_sum(value, group, dim=2, length=length)
            positions = torch.arange(length, device=query.device)
            causal = positions[start : start + size, None] >= positions
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=causal, scale=scaling, enable_gqa=True
            )
            return output.transpose(1, 2).contiguous(), None

        AttentionInterface.register("gathered", attend)
        parts.model.set_attn_implementation("gathered")  # type: ignore[operator]
        return parts

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hook that cuts micro-batches and sums gradients over cp."""
        if mesh.layout.cp == 1:
            return []
        parameters = [
            parameter
            for parameter in parts.model.parameters()
            if "cp" in parts.reduction(parameter).summed
        ]
        return [SequenceParts(self.sequence_length, parameters, mesh)]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Add keys and values, their gradients, and the sum of the parameters' gradients."""
        n = ledger.cp
        token_bytes = 0
        for parameter in facts.parameters:
            if parameter.name.endswith(("k_proj.weight", "v_proj.weight")):
                token_bytes += parameter.shape[0] * parameter.itemsize
        gathered = ledger.accumulation * ledger.tokens * token_bytes * (n - 1) // n
        ledger = ledger.add_traffic("all_gather", gathered).add_traffic("reduce_scatter", gathered)
        return ledger.add_traffic("all_reduce", 2 * gradient_bytes(facts, ledger) * (n - 1) // n)


class SequenceParts(StepHook):
    """Selects this rank's part of every sequence, and sums gradients over the parts."""

    def __init__(self, length: int, parameters: list[torch.nn.Parameter], mesh: Mesh) -> None:
        self.length = length
        self.parameters = parameters
        self.group = mesh.group("cp")

    def transform(self, batch: Any) -> Any:
        """Return the part of a batch whose labels are shifted and which has positions."""
        if batch["input_ids"].shape[1] != self.length or batch.get("attention_mask") is not None:
            raise InputError(
                f"parallel.cp: a batch has `input_ids` [batch, {self.length}] and no attention_mask"
            )
        start, size = shard_range(self.length, self.group)
        return {name: entry.narrow(1, start, size) for name, entry in batch.items()}

    def finish_reduction(self) -> None:
        """Sum gradients over cp, after the sums over data-parallel ranks."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                dist.all_reduce(local_tensor(parameter.grad), group=self.group)
