"""The tiny model of `trainers` with LoRA adapters, which PEFT makes."""

import torch

from tests.parity import trainers

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def model(dtype=torch.float32, *, dropout=0.0, targets=TARGETS, **settings):
    """Return the tiny model with adapters."""
    return on(trainers.model(dtype), dropout=dropout, targets=targets, **settings)


def on(base, *, dropout=0.0, targets=TARGETS, **settings):
    """Put adapters on a model. `settings` are further fields of LoraConfig."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=dropout,
        target_modules=list(targets),
        task_type="CAUSAL_LM",
        **settings,
    )
    adapted = get_peft_model(base, lora)

    # PEFT starts with B = 0, for which the gradient of A is zero and would not be compared.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=generator)
    return adapted


def with_copies(dtype=torch.float32):
    """Return the model with adapters, of which the head and the embedding train in full."""
    return model(dtype, modules_to_save=["lm_head", "embed_tokens"])
