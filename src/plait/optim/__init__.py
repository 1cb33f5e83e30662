"""Optimizers, LR schedules, and the global norm of gradients.

`optimizer` and `lr_schedules` build the optimizer and the schedule of a configuration.
`gradient_norm` computes one norm over all ranks. `low_bit_adam` stores optimizer states in 8 bits,
`disk_optimizer` in files, and `backward_optimizer` updates parameters during the backward.
"""
