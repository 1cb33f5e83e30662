"""Waits, kernels, copies and collectives of one training step, of Plait beside plain torch."""
