"""FlashAttention on complete sequences.

The function is the one that Transformers finds for a name: that of the package, or a kernel of the
Hub.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from plait.parallel.context.kernel import AttentionRule
from plait.parallel.micro_batches import to_device

IMPLEMENTATIONS = ("flash_attention_2", "flash_attention_3")
"""Transformers' names of the implementations."""


@dataclass(frozen=True)
class PackedDocuments:
    """Documents of a micro-batch as FlashAttention takes them: all rows are concatenated.

    Attributes:
        bounds: Start of each document, and end of the last one: [documents + 1] int32, on the
            device.
        longest: Number of tokens of the longest document.
    """

    bounds: torch.Tensor
    longest: int

    @classmethod
    def of(cls, starts: torch.Tensor, device: torch.device) -> PackedDocuments:
        """Find the documents of a micro-batch. Waits for the device of `starts`.

        Args:
            starts: [batch, tokens], position at which the document of each token begins.
            device: Device of the result.
        """
        is_first = starts == torch.arange(starts.shape[1], device=starts.device)
        first_tokens = is_first.flatten().nonzero().flatten()
        bounds = F.pad(first_tokens, (0, 1), value=starts.numel()).to(torch.int32)
        return cls(to_device(bounds, device), int(torch.diff(bounds).max()))


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: PackedDocuments | None,
    rule: AttentionRule,
    implementation: str,
) -> torch.Tensor:
    """Compute causal attention of complete sequences. The result is differentiable.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: [batch, kv_heads, tokens, head_dim].
        value: [batch, kv_heads, tokens, width].
        documents: Documents of the rows, or None if each row is one document.
        rule: Rule of the layer.
        implementation: Transformers' name of the implementation.

    Returns:
        [batch, heads, tokens, width].
    """
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    functions, (process_arguments, _) = lazy_import_flash_attention(implementation)
    row_function, document_function, *_ = functions
    batch, _, length, head_dim = query.shape
    # FlashAttention requires values as wide as queries.
    padding = head_dim - value.shape[3]
    # [batch, tokens, heads, head_dim]
    inputs = [x.transpose(1, 2) for x in (query, key, F.pad(value, (0, padding)))]
    settings = {"softmax_scale": rule.scale, "sliding_window": rule.window, "softcap": rule.softcap}
    if documents is None:
        output = row_function(*inputs, **process_arguments(length, length, True, **settings))
    else:
        bounds = documents.bounds
        settings |= {"max_seqlen_q": documents.longest, "max_seqlen_k": documents.longest}
        # [batch * tokens, heads, head_dim]
        packed = [x.reshape(-1, *x.shape[2:]) for x in inputs]
        arguments = process_arguments(length, length, True, **settings)
        output = document_function(*packed, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **arguments)
    # Some versions also return the log-sum-exp.
    if isinstance(output, tuple):
        output = output[0]
    output = output.view(batch, length, *output.shape[-2:])
    return output[..., : head_dim - padding].transpose(1, 2)
