"""Optimizers, LR schedules, and norms of gradients.

`optimizer` and `lr_schedules` build the optimizer and the schedule of a configuration.
`gradient_math` computes norms and scales gradients. `low_bit_adam` stores optimizer states in 8
bits, `disk_optimizer` in files, and `backward_optimizer` updates parameters during the backward.
"""
