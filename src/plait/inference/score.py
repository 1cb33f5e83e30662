"""`score`: what a model on any layout gives to the tokens of whole sequences, as its trainer
computes it: in full passes, with no cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from plait.checkpoint.agreement import together
from plait.errors import InputError
from plait.inference.capacity import check_positions, is_sharded
from plait.inference.choose import log_softmax
from plait.inference.generate import check_model, of_first_rank
from plait.inference.predictor import Predictor, Read
from plait.inference.requests import Request, check_count, check_ids, checked_ids, token_ids
from plait.inference.rope_by_length import RopeByLength, groups, refuse_past, rope_by_length
from plait.inference.untouched import untouched
from plait.inference.vocabulary import tokens_of_tokenizer
from plait.sharded.model import ShardedModel


def score(
    sharded: ShardedModel,
    sequences: Any,
    *,
    tokenizer: Any = None,
    batch_size: int | None = None,
    vocabulary: bool = False,
) -> list[torch.Tensor]:
    """The log-probability of every token but the first of each of `sequences`, [tokens - 1], or
    with `vocabulary` of every token of the vocabulary in its place, [tokens - 1, vocabulary];
    float32 on the CPU.

    `sequences` are this data-parallel rank's own, and may be none: token ids, or texts or
    conversations (with `tokenizer`). Of the ranks that hold parts of one model (tp, pp) the first
    one's are taken, and all get the results. `batch_size` sequences go through the model at once
    (all), in the layout and the dtypes that it is trained in. Training goes on as if nothing had
    happened. Collective over all ranks. Raises InputError, on all of them, for what one of them
    cannot do.
    """
    sharded.refuse_within("score")

    def prepared() -> list[Request]:
        check_model(sharded)
        check_count("batch_size", batch_size)
        found = [
            Request(ids, 0, None)
            for ids in checked_ids(sharded.model, token_ids(sequences, tokenizer))
        ]
        words = tokens_of_tokenizer(tokenizer)
        for index, request in enumerate(found):
            check_ids(request.token_ids, f"sequence {index}", words, of="tokenizer")
        longest = max((len(request.token_ids) for request in found), default=0)
        check_positions(
            getattr(sharded.model, "config", None), longest, of="its length", remedy="shorten it"
        )
        rope = rope_by_length(sharded.model)
        if rope is not None and not rope.is_one:
            refuse_past(
                rope,
                longest,
                "score: layers of several RoPE types are not known to be right",
                "shorten it",
            )
        return found

    mesh = sharded.mesh
    requests, _ = together(prepared, device=mesh.device, doing="score", raising=InputError)
    requests = of_first_rank(sharded, requests)
    gathers = is_sharded(sharded.model)
    scorer = _Scorer(Predictor(sharded), tokenizer, vocabulary=vocabulary)
    with sharded.evaluating(), untouched(sharded.model, mesh.device):
        sequences = [request.token_ids for request in requests]
        scorer.predictor.run(
            scorer.forwards(sequences, batch_size, rope_by_length(sharded.model)), apart=not gathers
        )
    return scorer.found


class _Scorer:
    def __init__(self, predictor: Predictor, tokenizer: Any, *, vocabulary: bool) -> None:
        self.predictor, self._tokens = predictor, tokens_of_tokenizer(tokenizer)
        self._vocabulary = vocabulary
        self.found: list[torch.Tensor] = []

    def forwards(
        self, sequences: list[tuple[int, ...]], batch_size: int | None, rope: RopeByLength | None
    ) -> Iterator[None]:
        """Yields before every forward. Sequences are padded on the right, where a causal model does
        not look.
        """
        size = batch_size or len(sequences) or 1
        found: dict[int, torch.Tensor] = {}
        batches = [
            group[first : first + size]
            for group in groups(rope, [(len(one), len(one)) for one in sequences])
            for first in range(0, len(group), size)
        ]
        for indices in batches:
            batch = [sequences[index] for index in indices]
            if rope is not None and rope.remembers(max(map(len, batch))):
                yield
                self.predictor.idle()
            yield
            longest = max(map(len, batch))
            ids = torch.tensor([[*one, *[0] * (longest - len(one))] for one in batch])
            mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in batch])
            inputs: dict[str, Any] = {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": torch.arange(longest).expand_as(ids),
            }
            if "use_cache" in self.predictor.takes:
                inputs["use_cache"] = False
            read = self.predictor.logits(inputs)
            for row, index in enumerate(indices):
                found[index] = self._of_sequence(read, row, sequences[index])
        self.found = [found[index] for index in range(len(sequences))]

    def _of_sequence(self, read: Read, row: int, sequence: tuple[int, ...]) -> torch.Tensor:
        """From the logits [requests, positions, vocabulary] that one rank reads."""
        found: torch.Tensor | None = None

        def form() -> torch.Tensor:
            nonlocal found
            found = log_softmax(read()[row, : len(sequence) - 1, : self._tokens])
            if not self._vocabulary:
                found = found.gather(
                    1, torch.tensor(sequence[1:], device=found.device).unsqueeze(1)
                )[:, 0]
            return torch.tensor([found.shape[-1], int(found.dtype == torch.float64)])

        width, is_double = self.predictor.of_first(form, torch.zeros(2, dtype=torch.int64)).tolist()
        shape = (len(sequence) - 1, width) if self._vocabulary else (len(sequence) - 1,)
        box = (
            found
            if found is not None
            else torch.empty(shape, dtype=torch.float64 if is_double else torch.float32)
        )
        return self.predictor.shared(box.contiguous())
