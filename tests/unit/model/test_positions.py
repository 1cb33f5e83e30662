"""Models that count positions themselves are not searched for packed rows, and others are."""

import pytest
import torch
from torch import nn

from plait.model.positions import COUNTING_MODEL_TYPES, call_model, counts_positions
from tests.unit.model.families import VOCABULARY, family

pytest.importorskip("transformers")


@pytest.fixture
def searches(monkeypatch):
    """Record what Transformers' search for packed rows finds, each time it runs."""
    from transformers import masking_utils

    found = []
    search = masking_utils.find_packed_sequence_indices

    def recorded(position_ids):
        found.append(search(position_ids))
        return found[-1]

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", recorded)
    return found


def test_listed_model_types_count_positions_from_zero(searches):
    """Padding tokens, and tokens that begin or end a text, change nothing."""
    tokens = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
    tokens[0, :4], tokens[1, 3:6], tokens[2, 5:] = 0, 1, 2
    different = []
    for kind in sorted(COUNTING_MODEL_TYPES):
        model = family(kind)
        model.config._experts_implementation = (
            "batched_mm"  # torch's grouped_mm does not support float64
        )
        searches.clear()
        expected = model(input_ids=tokens, use_cache=False).logits
        packed = [found for found in searches if found is not None]
        searches.clear()
        logits = call_model(model, input_ids=tokens, use_cache=False).logits
        if packed or searches or not torch.equal(logits, expected) or not counts_positions(model):
            different.append((kind, len(packed), len(searches)))
    assert not different


def test_given_positions_are_searched(searches):
    model = family("llama")
    tokens = torch.ones(1, 6, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    packed = call_model(model, input_ids=tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, :3], packed[:, 3:])
    assert len(searches) == 1


def test_code_of_a_user_is_searched(searches):
    from transformers import LlamaForCausalLM, LlamaModel

    class OwnInnerModel(LlamaModel):
        def forward(self, input_ids, **kwargs):
            kwargs["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2]])
            return super().forward(input_ids=input_ids, **kwargs)

    class OwnModel(LlamaForCausalLM):
        pass

    model = family("llama")
    tokens = torch.ones(1, 6, dtype=torch.int64)
    assert not counts_positions(OwnModel(model.config)) and not counts_positions(nn.Linear(1, 1))
    model.model.__class__ = OwnInnerModel
    packed = call_model(model, input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(packed[:, :3], packed[:, 3:])
    assert len(searches) == 1


def test_a_sharded_model_counts_too():
    """`fully_shard` gives a module a class of torch's."""
    model = family("llama", device="meta")
    model.__class__ = type("FSDPLlama", (type(model),), {"__module__": "torch.distributed.fsdp"})
    assert counts_positions(model)
