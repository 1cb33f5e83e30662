"""The training engine.

`build.initialize` makes an `Engine` from a model and a configuration. The engine takes optimizer
steps on any layout, evaluates and generates with the model, and saves and loads checkpoints
(`state`, `resume`). `single_rank` runs one rank of a layout without the others, and `calibration`
measures steps for the planner.
"""
