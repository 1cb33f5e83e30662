"""Optimizers, LR schedules, and norms of gradients.

`optimizer` and `lr_schedules` build the optimizer and the schedule of a configuration.
`gradient_math` computes norms and scales gradients. `low_bit_adam` stores optimizer states in 8 or
16 bits, and `disk_optimizer` stores them in files. `backward_optimizer` updates parameters during
the backward.
"""
