"""Techniques of distributed training, one class each. They implement all choices of a layout.

Each file reads in the order in which a run calls it: `check`, `groups`, `apply`, `attach` and
`account`. What these methods install (reducers, attention kernels, pipeline runtimes) is in the
neighbouring package that is named after the subject. `parallel.order` lists the techniques in the
order in which they are applied.
"""
