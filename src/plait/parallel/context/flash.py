"""FlashAttention on complete sequences, through the function that Transformers finds for a name:
the package, or a kernel of the Hub.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from plait.parallel.context.kernel import Rule
from plait.parallel.micro_batches import to_device

IMPLEMENTATIONS = ("flash_attention_2", "flash_attention_3")
"""Transformers' names."""


@dataclass(frozen=True)
class Documents:
    """Documents of a micro-batch as FlashAttention takes them: all rows are concatenated."""

    bounds: torch.Tensor
    """Start of each document, and end of the last one: [documents + 1] int32, on the device."""
    longest: int
    """Tokens of the longest document."""

    @classmethod
    def of(cls, starts: torch.Tensor, device: torch.device) -> Documents:
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
    documents: Documents | None,
    rule: Rule,
    implementation: str,
) -> torch.Tensor:
    """Causal attention [batch, heads, tokens, width] of queries [batch, heads, tokens, head_dim],
    and keys and values [batch, kv_heads, tokens, ...]; differentiable. If `documents` is None, each
    row is one document.
    """
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    (of_rows, of_documents, *_), (arguments_of, _) = lazy_import_flash_attention(implementation)
    batch, _, length, width = query.shape
    narrower = width - value.shape[3]  # queries and values have one width there
    given = [x.transpose(1, 2) for x in (query, key, F.pad(value, (0, narrower)))]
    settings = {"softmax_scale": rule.scale, "sliding_window": rule.window, "softcap": rule.softcap}
    if documents is None:
        output = of_rows(*given, **arguments_of(length, length, True, **settings))
    else:
        bounds = documents.bounds
        settings |= {"max_seqlen_q": documents.longest, "max_seqlen_k": documents.longest}
        flat = [x.reshape(-1, *x.shape[2:]) for x in given]
        arguments = arguments_of(length, length, True, **settings)
        output = of_documents(*flat, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **arguments)
    output = output[0] if isinstance(output, tuple) else output
    return output.view(batch, length, *output.shape[-2:])[..., : width - narrower].transpose(1, 2)
