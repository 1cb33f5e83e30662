"""What a part of a sequence cannot honour is refused by name, before any process group."""

import pytest
import torch

import plait
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError, InputError, PlaitError
from plait.model.blocks import find_blocks
from plait.parallel.order import check_all
from plait.parallel.techniques.context_parallel import ContextParallel, local_batch
from tests.parity import cases
from tests.parity.experts import SIZES, Case, model_config


def check(family="llama", *, parallel=None, implementation=None, installed=None, **fields):
    """Check a model whose configuration has other fields. `installed` is an implementation that Transformers does not find here."""
    from transformers import AutoModelForCausalLM

    parallel = {"cp": 2, **(parallel or {})}
    world = parallel["cp"] * parallel.get("tp", 1)
    names = {"zero_optimization", "compile", "gradient_clipping"} & parallel.keys()
    rest = {name: parallel.pop(name) for name in names}
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": parallel, **rest}
    if family in SIZES:
        described = model_config(Case(family))
    else:
        described = cases.transformers_config(family, tied=False)
    for name, value in fields.items():
        setattr(described, name, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, attn_implementation=implementation)
    if installed is not None:
        model.config._attn_implementation_internal = installed
    resolved = resolve(load(config), world_size=world)
    check_all(resolved.context(model=model, blocks=find_blocks(model)))


def two_ranks():
    return resolve(load({"train_micro_batch_size_per_gpu": 1, "parallel": {"cp": 2}}), world_size=2)


REFUSED = [
    ("bloom", {}, r"parallel.cp = 2: BloomForCausalLM \(model_type 'bloom'\) is not among the causal language models"),
    ("gpt2", {"attn_pdrop": 0.1}, "has config.attn_pdrop = 0.1, and dropout of attention weights is not computed in parts; set it to 0"),
    ("llama", {"attention_dropout": 0.1}, "has config.attention_dropout = 0.1"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
    ("gemma", {"use_bidirectional_attention": True}, "attends in both directions"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary embeddings of type 'dynamic', whose frequencies depend on the longest position"),
    ("llama", {"implementation": "flex_attention"}, "computes attention with 'flex_attention', whose backward torch does not implement on devices of type 'cpu'"),
    ("llama", {"installed": "paged|sdpa"}, r"computes attention with 'paged\|sdpa', whose results for parts of the keys cannot be combined"),
    ("llama", {"installed": "flash_attention_2", "parallel": {"context": "ring"}}, "'flash_attention_2', which requires complete sequences, but with parallel.context = 'ring' a rank has only parts; use"),
    ("gpt_oss", {"installed": "flash_attention_2", "parallel": {"context": "ulysses"}}, "has attention sinks, which some versions of 'flash_attention_2' silently ignore"),
    ("llama", {"parallel": {"cp": 3, "context": "ulysses"}}, 'parallel.cp = 3: parallel.context = "ulysses" gives each rank equally many heads, num_attention_heads is 4, and 4 % 3 != 0; use a divisor'),
    ("llama", {"parallel": {"cp": 4, "tp": 2, "context": "ulysses"}}, r"num_attention_heads is 4 / parallel.tp 2 = 2, and 2 % 4 != 0"),
    ("llama", {"parallel": {"compile": {"enabled": True}}}, "compile.enabled is true"),
    ("llama", {"parallel": {"optimizer_in_backward": True, "gradient_clipping": 0}}, "updates a parameter before its gradient is summed over cp"),
    ("llama", {"parallel": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "x"}}}}, "gradients in files are not summed over cp"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    REFUSED,
    ids=[f"{row[0]} {next(iter(row[1]), '')}" for row in REFUSED],
)
def test_refused_by_name(family, fields, message):
    with pytest.raises(PlaitError, match=message):
        check(family, **fields)


@pytest.mark.parametrize("kind", ["all-gather-kv", "ring", "ulysses"])
def test_accepted(kind):
    """A degree may exceed the key-value heads. Where heads are not exchanged, it need not divide a head count."""
    check("llama", parallel={"cp": 4, "context": kind})
    check("gemma2", parallel={"context": kind})
    if kind != "ulysses":
        check("llama", parallel={"cp": 3, "context": kind})


def test_a_plain_module():
    model = cases.build("plain", tied=False)
    resolved = two_ranks()
    with pytest.raises(
        PlaitError, match="PlainModel does not call attention through the attention interface"
    ):
        check_all(resolved.context(model=model, blocks=find_blocks(model)))


def test_a_loss_of_samples():
    """Its weight would count each sample on every rank."""
    model = cases.build("llama", tied=False)
    loss = plait.per_sample(lambda output, batch: output.logits.sum())
    with pytest.raises(ConfigError, match="parallel.cp = 2: the loss is a mean over samples"):
        plait.initialize(model, two_ranks(), loss_fn=loss)


def test_documents_with_a_cache():
    ids = torch.zeros(1, 8, dtype=torch.int64)
    batch = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    technique = ContextParallel()
    with pytest.raises(InputError, match="position_ids restart within a row.*use_cache"):
        technique.local_batch(batch, technique.layout(2, 0), keeps_cache=True)
    batch["use_cache"] = False
    own = technique.local_batch(batch, technique.layout(2, 1), keeps_cache=True)
    assert own["position_ids"].tolist() == [[2, 0, 1, 2]]
    assert own["attention_mask"][0, 0, :, 0].tolist() == [0, 3, 3, 3]


def test_documents_that_one_process_does_not_separate():
    ids, positions = torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)[None]
    technique = ContextParallel()

    def own_part(positions):
        batch = {"input_ids": ids, "position_ids": positions}
        return technique.local_batch(batch, technique.layout(2, 0), family="gpt_oss")

    words = "Transformers' gpt_oss ignores them .* use one row per document"
    with pytest.raises(InputError, match=words):
        own_part(positions % 3)
    assert own_part(positions)["use_cache"] is False


def test_labels_of_padding():
    ids = torch.ones(2, 8, dtype=torch.int64)
    mask = (torch.arange(8) < torch.tensor([[8], [5]])).long()
    words = "3 padding positions have a target|2 padding positions have"
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    with pytest.raises(InputError, match=words):
        local_batch(batch, ContextParallel(), 2, 0)


def test_labels_are_shifted_before_the_cut():
    """The last token of a part predicts the first of the next."""
    ids = torch.arange(8)[None]
    parts = [
        local_batch({"input_ids": ids, "labels": ids}, ContextParallel(), 2, rank)
        for rank in (0, 1)
    ]
    assert [part["input_ids"].tolist() for part in parts] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert [part["shift_labels"].tolist() for part in parts] == [[[1, 2, 7, -100]], [[3, 4, 5, 6]]]
    assert [part["position_ids"].tolist() for part in parts] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert all("labels" not in part for part in parts)
