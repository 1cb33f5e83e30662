"""Generation within a budget of memory, beside the same model in memory and beside accelerate's offload to disk."""
