"""The model of the runs that these tests start."""


def llama(**fields):
    """A `model` section with two small layers; `fields` are set besides, or in place of these."""
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    return {"config": {**config, "num_attention_heads": 2, "num_key_value_heads": 2, **fields}}
