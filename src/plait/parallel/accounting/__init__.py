"""Ledgers of memory and traffic, computed without tensors.

`ledger` holds the bytes of candidate layouts, to which every technique adds its own bytes.
`activations` and `peak` combine the measured bytes of one micro-batch, in the order of the schedule
of a step.
"""
