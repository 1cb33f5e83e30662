"""The model that a checkpoint of `plait train` says it is of."""

from __future__ import annotations

import torch
from torch import nn

from plait import exact
from plait.checkpoint.folder import Found
from plait.errors import CheckpointError
from plait.model.float32 import keep_in_float32


def described_model(found: Found, *, dtype: torch.dtype | None = None) -> nn.Module:
    """On meta, in `dtype` or the configuration's, but for what its class keeps in float32. Raises
    CheckpointError for a checkpoint that `plait train` did not write.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    client = exact.decode(found.manifest.metadata.get("client_state"), where="client_state")
    identity = client.get("identity") if isinstance(client, dict) else None
    if not isinstance(identity, dict):
        raise CheckpointError(
            f"{found.path} was not written by plait train, so it does not say which model it is;"
            " plait.load_trained(model, folder) loads its weights into yours"
        )
    fields = {
        name.removeprefix("model."): value
        for name, value in identity.items()
        if name.startswith("model.") and name != "model.dtype"
    }
    config = AutoConfig.for_model(
        fields.pop("model_type"),
        **{name: value for name, value in fields.items() if value is not None},
    )
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        )
    keep_in_float32(model, dtype or config.dtype)
    return model
