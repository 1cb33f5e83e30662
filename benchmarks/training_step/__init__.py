"""One optimizer step of the same model, data and weights under Plait, torch's own data parallel classes and DeepSpeed, in turns."""
