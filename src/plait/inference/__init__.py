"""Generation of tokens by a sharded model, on the layout that it is trained or loaded on."""
