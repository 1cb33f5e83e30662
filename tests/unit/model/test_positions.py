"""Models that count positions themselves are not searched for packed rows, and others are."""

import pytest
import torch
from torch import nn

from plait.model.positions import COUNTING_MODEL_TYPES, call_model, counts_positions
from tests.unit.model.families import VOCABULARY, family

pytest.importorskip("transformers")
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2]])
"""Positions of two sequences of three tokens in a row."""


@pytest.fixture
def searches(monkeypatch):
    """Results of Transformers' search for packed rows, one per search."""
    from transformers import masking_utils

    results = []
    search = masking_utils.find_packed_sequence_indices

    def recorded(position_ids):
        results.append(search(position_ids))
        return results[-1]

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", recorded)
    return results


def check_two_equal_sequences(model, searches, **inputs):
    tokens = torch.ones(1, 6, dtype=torch.int64)
    logits = call_model(model, input_ids=tokens, use_cache=False, **inputs).logits
    torch.testing.assert_close(logits[:, :3], logits[:, 3:])
    assert len(searches) == 1


def test_listed_model_types_count_positions_from_zero(searches):
    tokens = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
    # Padding tokens, and tokens that begin or end a text, must not change positions.
    tokens[0, :4] = 0
    tokens[1, 3:6] = 1
    tokens[2, 5:] = 2
    different = []
    for kind in sorted(COUNTING_MODEL_TYPES):
        model = family(kind)
        # torch's grouped_mm does not support float64.
        model.config._experts_implementation = "batched_mm"
        searches.clear()
        expected = model(input_ids=tokens, use_cache=False).logits
        has_packed_rows = any(indices is not None for indices in searches)
        searches.clear()
        logits = call_model(model, input_ids=tokens, use_cache=False).logits
        is_same = torch.equal(logits, expected) and counts_positions(model)
        if has_packed_rows or searches or not is_same:
            different.append((kind, has_packed_rows, len(searches)))
    assert not different


def test_given_positions_are_searched(searches):
    check_two_equal_sequences(family("llama"), searches, position_ids=PACKED)


def test_custom_classes_are_searched(searches):
    from transformers import LlamaForCausalLM, LlamaModel

    class CustomInnerModel(LlamaModel):
        def forward(self, input_ids, **kwargs):
            return super().forward(input_ids=input_ids, **{**kwargs, "position_ids": PACKED})

    class CustomModel(LlamaForCausalLM):
        pass

    model = family("llama")
    assert not counts_positions(CustomModel(model.config))
    assert not counts_positions(nn.Linear(1, 1))
    model.model.__class__ = CustomInnerModel
    check_two_equal_sequences(model, searches)


def test_a_sharded_model_counts_positions_too():
    """`fully_shard` gives a module a class of torch."""
    model = family("llama", device="meta")
    model.__class__ = type("FSDPLlama", (type(model),), {"__module__": "torch.distributed.fsdp"})
    assert counts_positions(model)
