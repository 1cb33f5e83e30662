"""Input and output of the verbs that plan: `plait plan`, `plait dryrun` and `plait plan infer`.

The planner itself is in `plait.planner`.
"""
