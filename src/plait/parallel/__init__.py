"""Techniques of distributed training.

Each technique declares its settings, its changes to a model (`apply`), its hooks of a training step
(`attach`) and its cost (`account`). `technique` defines this contract, `order` applies all
techniques in one order, and `hooks` defines the calls of a training step.
"""
