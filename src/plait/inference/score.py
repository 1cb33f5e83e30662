"""`score`: log probabilities of the tokens of complete sequences, by a model on any layout.

The log probabilities are computed as in training: in full forwards, without a KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from plait.comm.failures import run_on_all_ranks
from plait.errors import InputError
from plait.inference.capacity import check_positions, is_sharded
from plait.inference.decode import log_softmax
from plait.inference.generate import check_model, requests_of_first_rank
from plait.inference.generation_settings import check_ids, tokens_of_tokenizer
from plait.inference.predictor import LogitsReader, Predictor, untouched
from plait.inference.requests import GenerationRequest, check_count, checked_ids, token_ids
from plait.inference.rope_by_length import (
    RopeByLength,
    group_requests,
    refuse_above_original,
    rope_by_length,
)
from plait.sharded.model import ShardedModel


def score(
    sharded: ShardedModel,
    sequences: Any,
    *,
    tokenizer: Any = None,
    batch_size: int | None = None,
    vocabulary: bool = False,
) -> list[torch.Tensor]:
    """Return the log probabilities of the tokens of sequences. Collective over all ranks.

    Each data-parallel rank passes its own sequences, which may be none. Within one model replica
    (tp, pp), the sequences of the first rank are used, and all ranks get the results. The model
    computes in the layout and the dtypes that it is trained in. Training continues as if nothing
    had happened.

    Args:
        sharded: The model.
        sequences: One sequence or several: token ids, or texts or conversations, which require a
            tokenizer.
        tokenizer: A tokenizer of Transformers.
        batch_size: Number of sequences per forward. None computes all of them in one forward.
        vocabulary: Whether to return the log probabilities of all tokens of the vocabulary at every
            position.

    Returns:
        One float32 tensor on the CPU per sequence: the log probabilities of all tokens but the
        first. The shape is [tokens - 1], or [tokens - 1, vocabulary] if `vocabulary` is set.

    Raises:
        InputError: A rank cannot serve the call. The error is raised on all ranks.
    """
    sharded.refuse_within("score")

    def prepare() -> list[GenerationRequest]:
        check_model(sharded)
        check_count("batch_size", batch_size)
        prompts = checked_ids(sharded.model, token_ids(sequences, tokenizer))
        known_tokens = tokens_of_tokenizer(tokenizer)
        for index, ids in enumerate(prompts):
            check_ids(ids, f"sequence {index}", known_tokens, owner="tokenizer")

        longest = max(map(len, prompts), default=0)
        config = getattr(sharded.model, "config", None)
        check_positions(config, longest, content="its length", remedy="shorten it")
        rope = rope_by_length(sharded.model)
        if rope is not None and not rope.is_uniform:
            what = "score: layers of several RoPE types are not supported for such sequences"
            refuse_above_original(rope, longest, what, "shorten it")
        return [GenerationRequest(ids, 0, None) for ids in prompts]

    mesh = sharded.mesh
    requests, _ = run_on_all_ranks(
        prepare, device=mesh.device, activity="score", error_class=InputError
    )
    requests = requests_of_first_rank(sharded, requests)
    gathers = is_sharded(sharded.model)
    scorer = _Scorer(Predictor(sharded), tokenizer, vocabulary=vocabulary)
    with sharded.evaluating(), untouched(sharded.model, mesh.device):
        sequences = [request.token_ids for request in requests]
        forwards = scorer.forwards(sequences, batch_size, rope_by_length(sharded.model))
        scorer.predictor.run(forwards, independent=not gathers)
    return scorer.results


class _Scorer:
    """Scorer that computes the log probabilities of sequences, one batch at a time."""

    def __init__(self, predictor: Predictor, tokenizer: Any, *, vocabulary: bool) -> None:
        self.predictor = predictor
        self._tokens = tokens_of_tokenizer(tokenizer)
        self._vocabulary = vocabulary
        self.results: list[torch.Tensor] = []
        """Results in the order of the sequences, after all forwards."""

    def forwards(
        self, sequences: list[tuple[int, ...]], batch_size: int | None, rope: RopeByLength | None
    ) -> Iterator[None]:
        """Run all forwards. Yields before every forward.

        Args:
            sequences: Token ids.
            batch_size: See `score`.
            rope: Rotary embedding of the model.
        """
        lengths = [(len(ids), len(ids)) for ids in sequences]
        results: dict[int, torch.Tensor] = {}
        for indices in group_requests(rope, lengths, batch_size):
            batch = [sequences[index] for index in indices]
            if rope is not None and rope.remembers(max(map(len, batch))):
                yield
                self.predictor.idle()
            yield
            read = self.predictor.logits(self.predictor.padded_inputs(batch))
            for row, index in enumerate(indices):
                results[index] = self._logprobs(read, row, sequences[index])
        self.results = [results[index] for index in range(len(sequences))]

    def _logprobs(self, read: LogitsReader, row: int, sequence: tuple[int, ...]) -> torch.Tensor:
        """Return the log probabilities of one sequence. Collective over the ranks of one replica.

        Args:
            read: Reader of the logits [sequences, positions, vocabulary].
            row: Row of the sequence.
            sequence: Token ids of the sequence.
        """
        logprobs: torch.Tensor | None = None

        def compute() -> torch.Tensor:
            """Compute `logprobs`, and return its width and dtype as a tensor of two integers."""
            nonlocal logprobs
            # The logits of a position are those of the next token.
            logprobs = log_softmax(read()[row, : len(sequence) - 1, : self._tokens])
            if not self._vocabulary:
                next_tokens = torch.tensor(sequence[1:], device=logprobs.device)
                logprobs = logprobs.gather(1, next_tokens.unsqueeze(1))[:, 0]  # [tokens - 1]
            return torch.tensor([logprobs.shape[-1], int(logprobs.dtype == torch.float64)])

        # The other ranks need the width and the dtype of `logprobs` for the broadcast.
        form = self.predictor.compute_on_first(compute, torch.zeros(2, dtype=torch.int64))
        width, is_double = form.tolist()
        if logprobs is None:
            shape = (len(sequence) - 1, width) if self._vocabulary else (len(sequence) - 1,)
            logprobs = torch.empty(shape, dtype=torch.float64 if is_double else torch.float32)
        return self.predictor.broadcast(logprobs.contiguous())
