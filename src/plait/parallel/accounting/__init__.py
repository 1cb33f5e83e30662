"""Ledgers of memory and traffic, computed without tensors.

`ledger` holds the bytes of candidate layouts, and every technique adds its own. `activations` and
`peak` combine measured figures of one micro-batch along the schedule of a step.
"""
