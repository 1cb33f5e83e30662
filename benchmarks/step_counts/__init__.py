"""Kernels, copies, collectives and waits of one training step of Plait and of plain torch."""
