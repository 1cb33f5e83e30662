"""One optimizer step of the same model, data and weights in model parallelism, under Plait and under torch by hand, in turns."""
