"""Techniques of distributed training, one class per technique.

The fields of a class are its settings. Its methods are in the order in which a run calls them:
`check`, `groups`, `apply`, `attach` and `account`. The reducers, attention kernels and pipeline
runtimes that these methods install are in sibling packages such as `parallel.context`.
`parallel.order` lists the techniques in the order in which they are applied.
"""
