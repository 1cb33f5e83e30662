"""The tokens of a batch of requests: one forward for their prompts, then one for every token.

A forward may gather parameters from other ranks, so ranks take part in the same number of them. A rank that has no request (left) runs
them on a single token of no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from plait.errors import InputError
from plait.inference.choose import ENDS, GOES_ON, Chooser
from plait.inference.requests import Answer, Request
from plait.inference.settings import Settings
from plait.sharded.cache import arguments_of, keep_rows
from plait.sharded.model import ShardedModel

OnToken = Callable[[int, int], None]
"""(request, token), as soon as the token is chosen."""


class Decoder:
    """Of one rank. All ranks of a model's parts (tp, pp) have the same requests."""

    def __init__(
        self,
        sharded: ShardedModel,
        settings: Settings,
        *,
        tokenizer: Any,
        use_cache: bool,
        prefill_tokens: int | None,
        on_token: OnToken | None,
    ) -> None:
        self._sharded, self._settings, self._tokenizer = sharded, settings, tokenizer
        self._on_token = on_token
        self._use_cache, self._prefill = use_cache, prefill_tokens
        self._takes = arguments_of(sharded.model)
        self._by_name = "input_ids" in self._takes
        # Under sequence parallelism the head reads a part of the positions, and the last one is another rank's.
        self._last_only = "logits_to_keep" in self._takes and not (sharded.region is not None and sharded.region.sequence_parallel)
        at = sharded.mesh.coordinates
        self._stage = sharded.pipeline.output_rank if sharded.pipeline is not None else 0
        self._chooses = at["pp"] == self._stage and at["tp"] == 0

    def forwards(self, requests: Sequence[Request], first: int, answers: Sequence[Answer]) -> Iterator[None]:
        """Decode `requests`, of which the first has the number `first`; yields before every forward. New tokens are added to `answers`."""
        chooser = Chooser(requests, self._settings, self._tokenizer) if self._chooses else None
        state = _Cached(self, requests) if self._use_cache else _Recomputed(self, requests)
        rows = list(range(len(requests)))
        """Those that are computed; ones that have ended may be among them."""
        while True:
            logits = None
            for run in state.next_forwards():
                yield
                logits = run()
            chosen = self._shared(chooser(logits, rows) if chooser is not None and logits is not None else None, len(rows))
            ids, probabilities, ends = chosen[0].long().tolist(), chosen[1].tolist(), chosen[2].long().tolist()
            for row, token, probability, end in zip(rows, ids, probabilities, ends, strict=True):
                if answers[row].finish_reason:
                    continue
                answers[row].token_ids.append(token)
                answers[row].logprobs.append(probability)
                answers[row].finish_reason = ENDS[end]
                if self._on_token is not None:
                    self._on_token(first + row, token)
            if all(ends):
                return
            rows = [rows[at] for at in state.add(ids, [at for at, end in enumerate(ends) if end == GOES_ON])]

    def idle(self) -> None:
        """A forward whose result nobody reads."""
        ids = torch.zeros((1, 1), dtype=torch.long)
        self._predict({"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.zeros_like(ids)}, None)

    def predicted(self, inputs: dict[str, torch.Tensor], cache: Any, rows: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits [requests, vocabulary] of one position of every request: `rows`, or the last. None on a rank that has no logits."""
        if rows is None and self._last_only:
            inputs = {**inputs, "logits_to_keep": 1}  # type: ignore[dict-item]
        output = self._predict(inputs, cache)
        if not self._sharded.holds_output or not self._chooses:
            return None
        logits = _logits(output)
        return logits[:, -1] if rows is None else logits[torch.arange(len(rows), device=logits.device), rows.to(logits.device)]

    def _predict(self, inputs: dict[str, Any], cache: Any) -> Any:
        if not self._by_name:
            return self._sharded.predict(inputs["input_ids"])
        return self._sharded.predict({name: value for name, value in inputs.items() if name in self._takes}, cache=cache)

    def _shared(self, chosen: torch.Tensor | None, requests: int) -> torch.Tensor:
        """What the rank that chooses has chosen, on all ranks of the model's parts."""
        mesh = self._sharded.mesh
        box = torch.empty(3, requests, dtype=torch.float64) if chosen is None else chosen
        box = box.to(self._sharded.device)
        if (group := mesh.group("tp")) is not None and mesh.coordinates["pp"] == self._stage:
            dist.broadcast(box, group=group, group_src=0)
        if (group := mesh.group("pp")) is not None:
            dist.broadcast(box, group=group, group_src=self._stage)
        return box.cpu()


class _Cached:
    """Requests whose keys and values are kept. Prompts are padded on the left, so that all go on at the same place."""

    def __init__(self, decoder: Decoder, requests: Sequence[Request]) -> None:
        self._decoder = decoder
        self._cache = decoder._sharded.new_cache()
        longest = max(len(request.token_ids) for request in requests)
        pad = decoder._settings.pad_token_id
        self._ids = torch.tensor([[pad] * (longest - len(r.token_ids)) + list(r.token_ids) for r in requests])
        self._mask = torch.tensor([[0] * (longest - len(r.token_ids)) + [1] * len(r.token_ids) for r in requests])
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        """Of the tokens from `_start` on, which were added together."""
        self._start = self._seen = 0

    def next_forwards(self) -> Iterator[Callable[[], torch.Tensor | None]]:
        """Over the tokens that the model has not seen, in pieces of `prefill_tokens`."""
        end = self._ids.shape[1]
        step = self._decoder._prefill or end
        while self._seen < end:
            low, high = self._seen, min(self._seen + step, end)
            positions = self._positions[:, low - self._start : high - self._start]
            inputs = {"input_ids": self._ids[:, low:high], "attention_mask": self._mask[:, :high], "position_ids": positions}
            yield partial(self._decoder.predicted, inputs, self._cache)
            self._seen = high
            if self._cache.get_seq_length() != high:
                raise InputError(
                    f"the model was given {high} tokens and its cache holds {self._cache.get_seq_length()}: forward= of "
                    "plait.initialize does not pass `past_key_values` to the model, or the model does not use it; use use_cache=False"
                )

    def add(self, tokens: list[int], going: list[int]) -> list[int]:
        """One token for every request. Returns which rows are left: those in `going`, where what is kept of the others can be dropped."""
        self._start, self._positions = self._ids.shape[1], self._positions[:, -1:] + 1
        self._ids = torch.cat([self._ids, torch.tensor(tokens).unsqueeze(1)], dim=1)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        if len(going) < len(tokens) and keep_rows(self._cache, torch.tensor(going)):
            self._ids, self._mask, self._positions = self._ids[going], self._mask[going], self._positions[going]
            return going
        return list(range(len(tokens)))


class _Recomputed:
    """Requests of a model that keeps nothing: every token takes a forward over all before it. Padded on the right, where a causal model
    does not look."""

    def __init__(self, decoder: Decoder, requests: Sequence[Request]) -> None:
        self._decoder = decoder
        self._rows = [list(request.token_ids) for request in requests]

    def next_forwards(self) -> Iterator[Callable[[], torch.Tensor | None]]:
        """One, over everything."""
        longest, pad = max(map(len, self._rows)), self._decoder._settings.pad_token_id
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in self._rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in self._rows])
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(longest).expand_as(ids)}
        if "use_cache" in self._decoder._takes:
            inputs["use_cache"] = False  # type: ignore[assignment]
        last = torch.tensor([len(row) - 1 for row in self._rows])
        yield partial(self._decoder.predicted, inputs, None, last)

    def add(self, tokens: list[int], going: list[int]) -> list[int]:
        """One token for every request that goes on, which are left."""
        self._rows = [[*self._rows[at], tokens[at]] for at in going]
        return going


def _logits(output: Any) -> torch.Tensor:
    found = output
    if hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, dict):
        found = output.get("logits")
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.ndim != 3:
        raise InputError(
            f"generate needs logits [batch, sequence, vocabulary] and the model's output is a {type(output).__name__} without them; return "
            "a tensor, or an object with `logits`"
        )
    return found
