"""Inputs and settings that context parallelism refuses, before any process group exists."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import plait
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError, InputError, PlaitError
from plait.model.blocks import find_blocks
from plait.parallel.order import check_all
from plait.parallel.techniques.context_parallel import ContextParallel, local_batch
from tests.parity import cases
from tests.parity.experts import SIZES, Case, model_config

FLASH = {"internal": "flash_attention_2"}
RING = {"context": "ring"}
ULYSSES = {"context": "ulysses"}
NVME_STATES = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "x"}}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def resolved_config(world=2, *, parallel, **sections):
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": parallel, **sections}
    return resolve(load(config), world_size=world)


def check(
    family="llama", *, parallel=None, implementation=None, internal=None, config=None, **attributes
):
    """Check a model of the family at cp 2.

    Args:
        family: Family of the model.
        parallel: Other settings of the section "parallel".
        implementation: Implementation of attention.
        internal: Implementation of attention that Transformers does not find on this machine.
        config: Other sections of the configuration.
        attributes: Changed attributes of the model's configuration.
    """
    if family in SIZES:
        described = model_config(Case(family))
    else:
        described = cases.transformers_config(family, tied=False)
    for name, value in attributes.items():
        setattr(described, name, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, attn_implementation=implementation)
    if internal is not None:
        model.config._attn_implementation_internal = internal
    parallel = {"cp": 2, **(parallel or {})}
    world = parallel["cp"] * parallel.get("tp", 1)
    resolved = resolved_config(world, parallel=parallel, **(config or {}))
    check_all(resolved.context(model=model, blocks=find_blocks(model)))


REFUSED = [
    ("bloom", {}, r"parallel.cp = 2: BloomForCausalLM \(model_type 'bloom'\) is not among"),
    ("gpt2", {"attn_pdrop": 0.1}, "config.attn_pdrop = 0.1, and dropout .*; set it to 0"),
    ("llama", {"attention_dropout": 0.1}, "has config.attention_dropout = 0.1"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
    ("gemma", {"use_bidirectional_attention": True}, "attends in both directions"),
    ("llama", {"rope_parameters": DYNAMIC_ROPE}, "rotary embeddings of type 'dynamic'"),
    ("llama", {"implementation": "flex_attention"}, "'flex_attention', whose backward torch does"),
    ("llama", {"internal": "paged|sdpa"}, r"'paged\|sdpa', whose results .* cannot be combined"),
    (
        "llama",
        {**FLASH, "parallel": RING},
        "requires complete .* parallel.context = 'ring' .*; use",
    ),
    ("gpt_oss", {**FLASH, "parallel": ULYSSES}, "has attention sinks, which some versions of 'fla"),
    ("llama", {"parallel": {**ULYSSES, "cp": 3}}, "cp = 3: .*, and 4 % 3 != 0; use a divisor"),
    ("llama", {"parallel": {**ULYSSES, "cp": 4, "tp": 2}}, "parallel.tp 2 = 2, and 2 % 4 != 0"),
    ("llama", {"config": {"compile": {"enabled": True}}}, "compile.enabled is true"),
    (
        "llama",
        {"parallel": {"optimizer_in_backward": True}, "config": {"gradient_clipping": 0}},
        "updates a parameter before its gradient is summed over cp",
    ),
    ("llama", {"config": {"zero_optimization": NVME_STATES}}, "in files are not summed over cp"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_refused(family, changes, message):
    with pytest.raises(PlaitError, match=message):
        check(family, **changes)


@pytest.mark.parametrize("kind", ["all-gather-kv", "ring", "ulysses"])
def test_accepted(kind):
    """A degree may exceed the key-value heads. Only ulysses needs a divisor of the heads."""
    check("llama", parallel={"cp": 4, "context": kind})
    check("gemma2", parallel={"context": kind})
    if kind != "ulysses":
        check("llama", parallel={"cp": 3, "context": kind})


def test_a_model_without_the_attention_interface_is_refused():
    model = cases.build("plain", tied=False)
    resolved = resolved_config(parallel={"cp": 2})
    with pytest.raises(PlaitError, match="PlainModel does not call attention through the"):
        check_all(resolved.context(model=model, blocks=find_blocks(model)))


def test_a_loss_per_sample_is_refused():
    """The weight of the loss would count each sample on every rank."""
    model = cases.build("llama", tied=False)
    loss = plait.per_sample(lambda output, batch: output.logits.sum())
    with pytest.raises(ConfigError, match="parallel.cp = 2: the loss is a mean over samples"):
        plait.initialize(model, resolved_config(parallel={"cp": 2}), loss_fn=loss)


def test_documents_with_a_cache_are_refused():
    ids = torch.zeros(1, 8, dtype=torch.int64)
    batch = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    technique = ContextParallel()
    with pytest.raises(InputError, match="position_ids restart within a row.*use_cache"):
        technique.local_batch(batch, technique.layout(2, 0), keeps_cache=True)
    # The remedy works.
    batch["use_cache"] = False
    local = technique.local_batch(batch, technique.layout(2, 1), keeps_cache=True)
    assert local["position_ids"].tolist() == [[2, 0, 1, 2]]
    assert local["attention_mask"][0, 0, :, 0].tolist() == [0, 3, 3, 3]


def test_documents_that_the_model_ignores_are_refused():
    technique = ContextParallel()
    positions = torch.arange(8)[None]

    def shard(positions):
        batch = {"input_ids": torch.zeros_like(positions), "position_ids": positions}
        return technique.local_batch(batch, technique.layout(2, 0), family="gpt_oss")

    message = "Transformers' gpt_oss ignores them .* use one row per document"
    with pytest.raises(InputError, match=message):
        shard(positions % 3)
    assert shard(positions)["use_cache"] is False


def test_labels_of_padding_are_refused():
    ids = torch.ones(2, 8, dtype=torch.int64)
    mask = (torch.arange(8) < torch.tensor([[8], [5]])).long()
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    with pytest.raises(InputError, match="[23] padding positions have"):
        local_batch(batch, ContextParallel(), 2, 0)


def test_labels_are_shifted_before_the_cut():
    """The last token of a chunk predicts the first one of the next."""
    ids = torch.arange(8)[None]
    for rank, tokens, labels in (
        (0, [0, 1, 6, 7], [1, 2, 7, -100]),
        (1, [2, 3, 4, 5], [3, 4, 5, 6]),
    ):
        local = local_batch({"input_ids": ids, "labels": ids}, ContextParallel(), 2, rank)
        assert local["input_ids"].tolist() == [tokens]
        assert local["position_ids"].tolist() == [tokens]
        assert local["shift_labels"].tolist() == [labels]
        assert "labels" not in local
