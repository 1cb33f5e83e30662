"""Planner: predicts which layouts of a training run fit into memory, and how fast each is.

The planner is pure arithmetic on the shapes of a model and the datasheet of a device. It needs no
process group, GPU, environment variable or network. `plan` (`plait.planner.search`) searches all
layouts of a `Request`; `price` (`plait.planner.search`) predicts time and memory of given layouts;
`complete` (`plait.planner.configuration`) replaces "auto" in a configuration.

Note [Arrays of candidates]
    A candidate is a layout that a search considers. All formulas work on arrays with one entry per
    candidate (`plait.planner.job.Layouts`), because a search estimates several hundred thousand of
    them. `Numbers` in an annotation means a scalar or such an array.
"""
