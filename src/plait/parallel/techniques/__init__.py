"""Techniques of distributed training, one class per technique. Its fields are the settings.

The methods of a class are in the order in which a run calls them: `check`, `groups`, `apply`,
`attach` and `account`. The reducers, attention kernels and pipeline runtimes that these methods
install are in sibling packages such as `parallel.context`. `parallel.order` lists the techniques in
the order in which they are applied.
"""
