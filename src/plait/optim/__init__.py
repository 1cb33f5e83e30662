"""Optimizers, learning rate schedules, and the global norm of gradients."""
