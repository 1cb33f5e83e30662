"""Techniques of distributed training, one class each. They implement all choices of a layout.

A class has its methods in the order in which a run calls them: `check`, `groups`, `apply`, `attach`
and `account`. What these methods install (reducers, attention kernels, pipeline runtimes) is in the
neighbouring package that is named after the subject. `parallel.order` lists the techniques in the
order in which they are applied.
"""
