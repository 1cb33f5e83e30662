"""A folder of PEFT's LoRA on a model for inference has the numbers of PEFT in Transformers: in memory and streamed."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import plait
from plait.errors import CheckpointError, InputError
from plait.inference.deployment import load_model
from plait.inference.source import open_source
from plait.inference.streamed_model import load_streamed
from tests.integration.model_folder import model_folder

peft = pytest.importorskip("peft")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[5, 17, 33, 2, 90], [8, 3], [71, 12, 12]]
SMALL, OTHER = 280 << 10, 10 << 10
"""A budget that streams layers of the small model, and the part of it for other things than weights."""
KINDS = {
    "lora": {"r": 4, "lora_alpha": 8},
    "ranks and scales": {"r": 2, "rank_pattern": {"o_proj": 5}, "alpha_pattern": {"up_proj": 32}, "use_rslora": True},
    "dora": {"r": 3, "use_dora": True},
    "some layers": {"r": 2, "layers_to_transform": [1, 4]},
    "in full": {"r": 2, "modules_to_save": ["lm_head"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("llama"))


def saved(base, folder, **fields):
    """Save an adapter whose part of every layer is not zero."""
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"target_modules": LINEAR, **fields})
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.2)
    made.save_pretrained(folder)
    return folder


def by_peft(base, adapter, *, dtype=None):
    """New tokens and their log-probabilities, computed by Transformers and PEFT in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    longest = max(map(len, PROMPTS))
    padding = [[0] * (longest - len(prompt)) for prompt in PROMPTS]
    ids = torch.tensor([left + prompt for left, prompt in zip(padding, PROMPTS, strict=True)])
    mask = torch.tensor([left + [1] * (longest - len(left)) for left in padding])
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 10, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
    made = model.eval().generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **options)
    tokens = made.sequences[:, longest:]
    logprobs = torch.log_softmax(torch.stack(made.logits, 1).float(), -1)
    return tokens.tolist(), logprobs.gather(2, tokens.unsqueeze(2))[..., 0]


def of(sharded):
    """New tokens and their log-probabilities, computed by Plait."""
    options = {"max_new_tokens": 10, "temperature": 0, "eos_token_id": [10**6], "pad_token_id": 0}
    made = plait.generate(sharded, PROMPTS, **options)
    sharded.close()
    return [one.token_ids for one in made], torch.tensor([one.logprobs for one in made])


def streamed(source, budget=SMALL):
    sharded, plan = load_streamed(source, budget_bytes=budget, other_bytes=OTHER)
    return of(sharded), len(plan.streamed)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_pefts(kind, base, tmp_path):
    adapter = saved(base, tmp_path / "adapter", **KINDS[kind])
    tokens, logprobs = by_peft(base, adapter)
    assert tokens != by_peft(base, None)[0]
    source = open_source(base, adapter)
    resident = of(load_model(source))
    assert resident[0] == tokens and (resident[1] - logprobs).abs().max() <= 1e-5
    found, layers = streamed(source)
    assert layers >= 2 and found[0] == tokens and torch.equal(found[1], resident[1])


def test_16_bits(base, tmp_path):
    """PEFT computes the adapter of such a model in float32."""
    adapter = saved(base, tmp_path / "adapter", **KINDS["lora"])
    tokens, logprobs = by_peft(base, adapter, dtype=torch.bfloat16)
    found = of(load_model(open_source(base, adapter), dtype=torch.bfloat16))
    assert found[0] == tokens and torch.equal(found[1], logprobs.double().float())


def test_the_adapter_is_counted(base, tmp_path):
    """Adapters stay in memory, so more layers are streamed."""
    budget = {"budget_bytes": 450 << 10, "other_bytes": OTHER}
    plans = []
    for rank in (1, 24):
        adapter = saved(base, tmp_path / str(rank), r=rank)
        sharded, plan = load_streamed(open_source(base, adapter), **budget)
        sharded.close()
        plans.append(plan)
    assert len(plans[0].streamed) < len(plans[1].streamed)
    assert all(plan.resident_bytes + plan.slot_bytes + OTHER <= 450 << 10 for plan in plans)
    large = open_source(base, saved(base, tmp_path / "96", r=96))
    with pytest.raises(InputError, match=r"pass at least"):
        load_streamed(large, budget_bytes=SMALL, other_bytes=OTHER)


def test_a_folder_of_the_adapter_names_its_base(base, tmp_path):
    adapter = saved(base, tmp_path / "adapter", **KINDS["lora"])
    assert of(load_model(open_source(adapter)))[0] == by_peft(base, adapter)[0]
    with pytest.raises(InputError, match="is an adapter itself"):
        open_source(adapter, adapter)
    changed(adapter, base_model_name_or_path="someone/model")
    words = "its base model 'someone/model' is not a folder on this machine; pass --model BASE --adapter"
    with pytest.raises(InputError, match=words):
        open_source(adapter)


def changed(adapter, **fields):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **fields}))


@pytest.fixture(scope="module")
def plain(base, tmp_path_factory):
    return saved(base, tmp_path_factory.mktemp("adapter"), **KINDS["lora"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "is of the kind IA3; only LORA is supported"),
        ({"alora_invocation_tokens": [3, 4]}, r"alora_invocation_tokens = \[3, 4\] is not supported"),
        ({"layer_replication": [[0, 4], [2, 6]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"a_later_field": {"x": 1}}, "a_later_field"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' has also changed the base model's weights"),
        ({"target_modules": ["no_such"]}, "PEFT cannot add it to the model"),
        ({"target_modules": ["q_proj"]}, "which the model does not have; pass an adapter of this model"),
        ({"r": 5}, r"the model's is \[5, 64\]"),
        ({"lora_bias": True}, "lacks .* tensors of the adapter, first model.layers.0"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(fields, words, base, plain, tmp_path):
    adapter = Path(shutil.copytree(plain, tmp_path / "adapter"))
    changed(adapter, **fields)
    with pytest.raises(InputError, match=words):
        open_source(base, adapter).model()


def test_folders_that_are_none(base, plain, tmp_path):
    with pytest.raises(InputError, match=r"has no adapter_config\.json"):
        open_source(base, tmp_path)
    adapter = Path(shutil.copytree(plain, tmp_path / "adapter"))
    (adapter / "adapter_model.safetensors").write_bytes(b"no such file")
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        open_source(base, adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors"):
        open_source(base, adapter)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a configuration of PEFT"):
        open_source(adapter)


def test_what_tied_weights_exclude(base, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = True
    tied = tmp_path / "tied"
    AutoModelForCausalLM.from_config(config).save_pretrained(tied)
    made = saved(tied, tmp_path / "head", **KINDS["in full"])
    with pytest.raises(InputError, match=r"contains a fully trained .*, but the model ties it"):
        open_source(tied, made).model()
    assert of(load_model(open_source(tied, saved(tied, tmp_path / "lora", r=3))))[0]


def test_gpt2(tmp_path):
    """Its linear layers have transposed weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 120, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**sizes, initializer_range=0.3, eos_token_id=None)
    base = tmp_path / "base"
    GPT2LMHeadModel(config).save_pretrained(base)
    layers = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    adapter = saved(base, tmp_path / "adapter", r=3, **layers)
    tokens, _ = by_peft(base, adapter)
    assert tokens != by_peft(base, None)[0]
    source = open_source(base, adapter)
    assert of(load_model(source))[0] == tokens
    found, layers = streamed(source, budget=200 << 10)
    assert layers and found[0] == tokens


@pytest.fixture(autouse=True)
def _closed():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
