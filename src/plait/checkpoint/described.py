"""Build the model that a checkpoint of `plait train` describes, without weights."""

from __future__ import annotations

import torch
from torch import nn

from plait import exact
from plait.checkpoint.folder import CheckpointFolder
from plait.errors import CheckpointError
from plait.model.float32 import keep_in_float32


def build_described_model(
    checkpoint: CheckpointFolder, *, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the model of a checkpoint on the meta device.

    Args:
        checkpoint: Checkpoint that `plait train` wrote.
        dtype: dtype of the parameters, except those that the model's class keeps in float32. None
            uses that of the saved configuration.

    Raises:
        CheckpointError: `plait train` did not write the checkpoint.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    client = exact.decode(checkpoint.manifest.metadata.get("client_state"), where="client_state")
    identity = client.get("identity") if isinstance(client, dict) else None
    if not isinstance(identity, dict):
        raise CheckpointError(
            f"{checkpoint.path} was not written by plait train, so it does not say which model it"
            " is; plait.load_trained(model, folder) loads its weights into yours"
        )
    fields = {
        name.removeprefix("model."): value
        for name, value in identity.items()
        if name.startswith("model.") and name != "model.dtype"
    }
    model_type = fields.pop("model_type")
    settings = {name: value for name, value in fields.items() if value is not None}
    config = AutoConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        )
    keep_in_float32(model, dtype or config.dtype)
    return model
