"""Model of the runs that these tests start."""


def llama(**fields):
    """Return a `model` section with two small layers. `fields` override its configuration."""
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return {"config": {**config, **fields}}
