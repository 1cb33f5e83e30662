"""A LoRA adapter on a model for inference gives the numbers of PEFT, in memory and streamed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import plait
from plait.errors import CheckpointError, InputError
from plait.inference.deployment import load_model
from plait.inference.source import open_source
from plait.inference.streamed_model import load_streamed
from tests.integration.model_folder import model_folder
from tests.unit.inference.models import saved

peft = pytest.importorskip("peft")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[5, 17, 33, 2, 90], [8, 3], [71, 12, 12]]
BUDGET_BYTES = 280 << 10
"""A budget that streams layers of the small model."""
OTHER_BYTES = 10 << 10
"""The part of a budget that weights cannot use."""
KINDS = {
    "lora": {"r": 4, "lora_alpha": 8},
    "ranks and scales": {
        "r": 2,
        "rank_pattern": {"o_proj": 5},
        "alpha_pattern": {"up_proj": 32},
        "use_rslora": True,
    },
    "dora": {"r": 3, "use_dora": True},
    "some layers": {"r": 2, "layers_to_transform": [1, 4]},
    "in full": {"r": 2, "modules_to_save": ["lm_head"]},
}


@pytest.fixture(autouse=True)
def _process_group_is_closed():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def lora(base, tmp_path_factory):
    return save_adapter(base, tmp_path_factory.mktemp("adapter"), **KINDS["lora"])


def save_adapter(base, folder, **fields):
    """Save an adapter that changes the output of every layer."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"target_modules": LINEAR, **fields})
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # PEFT initialises one of each pair with zeros.
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    return folder


def change_config(adapter, **fields):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def peft_answers(base, adapter, *, dtype=None):
    """Return the tokens and log-probabilities that Transformers and PEFT generate."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    model.generation_config.eos_token_id = None
    longest = max(map(len, PROMPTS))
    padding = [longest - len(prompt) for prompt in PROMPTS]
    output = model.eval().generate(
        input_ids=torch.tensor([[0] * n + p for n, p in zip(padding, PROMPTS, strict=True)]),
        attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding]),
        pad_token_id=0,
        max_new_tokens=10,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[:, longest:]
    logprobs = torch.log_softmax(torch.stack(output.logits, 1).float(), -1)
    return tokens.tolist(), logprobs.gather(2, tokens.unsqueeze(2))[..., 0]


def plait_answers(sharded):
    """Return the tokens and log-probabilities that Plait generates, and close the model."""
    options = {"max_new_tokens": 10, "temperature": 0, "eos_token_id": [10**6], "pad_token_id": 0}
    answers = plait.generate(sharded, PROMPTS, **options)
    sharded.close()
    tokens = [answer.token_ids for answer in answers]
    return tokens, torch.tensor([answer.logprobs for answer in answers])


def check_against_peft(base, adapter, budget_bytes=BUDGET_BYTES):
    tokens, logprobs = peft_answers(base, adapter)
    assert tokens != peft_answers(base, None)[0]
    source = open_source(base, adapter)
    resident_tokens, resident_logprobs = plait_answers(load_model(source))
    assert resident_tokens == tokens and (resident_logprobs - logprobs).abs().max() <= 1e-5

    sharded, plan = load_streamed(source, budget_bytes=budget_bytes, other_bytes=OTHER_BYTES)
    streamed_tokens, streamed_logprobs = plait_answers(sharded)
    assert len(plan.streamed) >= 2
    assert streamed_tokens == tokens and torch.equal(streamed_logprobs, resident_logprobs)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_peft(kind, base, tmp_path):
    check_against_peft(base, save_adapter(base, tmp_path / "adapter", **KINDS[kind]))


def test_gpt2_has_transposed_weights(tmp_path):
    saved(tmp_path / "base", "gpt2", layers=4, n_embd=32)
    layers = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", r=3, **layers)
    check_against_peft(tmp_path / "base", adapter, budget_bytes=200 << 10)


def test_bfloat16_models_compute_adapters_in_float32(base, lora):
    """PEFT does so too."""
    tokens, logprobs = peft_answers(base, lora, dtype=torch.bfloat16)
    sharded = load_model(open_source(base, lora), dtype=torch.bfloat16)
    actual_tokens, actual_logprobs = plait_answers(sharded)
    assert actual_tokens == tokens and torch.equal(actual_logprobs, logprobs.double().float())


def test_the_budget_includes_the_adapter(base, tmp_path):
    """Adapters stay in memory, so a larger one has more layers streamed."""
    budget_bytes = 450 << 10
    plans = []
    for rank in (1, 24):
        source = open_source(base, save_adapter(base, tmp_path / str(rank), r=rank))
        sharded, plan = load_streamed(source, budget_bytes=budget_bytes, other_bytes=OTHER_BYTES)
        sharded.close()
        assert plan.resident_bytes + plan.slot_bytes + OTHER_BYTES <= budget_bytes
        plans.append(plan)
    assert len(plans[0].streamed) < len(plans[1].streamed)

    source = open_source(base, save_adapter(base, tmp_path / "96", r=96))
    with pytest.raises(InputError, match=r"pass at least"):
        load_streamed(source, budget_bytes=BUDGET_BYTES, other_bytes=OTHER_BYTES)


def test_an_adapter_folder_names_its_base_model(base, lora, tmp_path):
    adapter = Path(shutil.copytree(lora, tmp_path / "adapter"))
    assert plait_answers(load_model(open_source(adapter)))[0] == peft_answers(base, adapter)[0]
    change_config(adapter, base_model_name_or_path="someone/model")
    message = "its base model 'someone/model' is not a folder on this machine; pass --model BASE"
    with pytest.raises(InputError, match=message):
        open_source(adapter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alora_invocation_tokens": [3, 4]}, r"alora_invocation_tokens = \[3, 4\] is not sup"),
        ({"layer_replication": [[0, 4], [2, 6]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"a_later_field": {"x": 1}}, "a_later_field"),
        ({"target_modules": ["no_such"]}, "PEFT cannot add it to the model"),
        ({"target_modules": ["q_proj"]}, "does not have; pass an adapter of this model"),
        ({"r": 5}, r"the model's is \[5, 64\]"),
        ({"lora_bias": True}, "lacks .* tensors of the adapter, first model.layers.0"),
    ],
)
def test_unsupported_adapters_are_refused(fields, message, base, lora, tmp_path):
    adapter = Path(shutil.copytree(lora, tmp_path / "adapter"))
    change_config(adapter, **fields)
    with pytest.raises(InputError, match=message):
        open_source(base, adapter).model()


def test_damaged_folders_are_refused(base, lora, tmp_path):
    adapter = Path(shutil.copytree(lora, tmp_path / "adapter"))
    (adapter / "adapter_model.safetensors").write_bytes(b"no such file")
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        open_source(base, adapter)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a configuration of PEFT"):
        open_source(adapter)


def test_a_fully_trained_head_excludes_tied_weights(base, tmp_path):
    config = AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = True
    tied = tmp_path / "tied"
    AutoModelForCausalLM.from_config(config).save_pretrained(tied)
    head = save_adapter(tied, tmp_path / "head", **KINDS["in full"])
    with pytest.raises(InputError, match=r"contains a fully trained .*, but the model ties it"):
        open_source(tied, head).model()

    low_rank = save_adapter(tied, tmp_path / "lora", r=3)
    assert plait_answers(load_model(open_source(tied, low_rank)))[0]
