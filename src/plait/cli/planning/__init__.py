"""Input and output of `plait plan`, `plait dryrun` and `plait plan infer`.

The planner itself is in `plait.planner`.
"""
