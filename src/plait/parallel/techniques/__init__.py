"""Techniques of distributed training, one class each, which implement all choices of a layout.

A class has its methods in the order in which a run calls them: `check`, `groups`, `apply`, `attach`
and `account`. The reducers, attention kernels and pipeline runtimes that these methods install are
in the neighbouring packages that are named after their subjects. `parallel.order` lists the
techniques in the order in which they are applied.
"""
