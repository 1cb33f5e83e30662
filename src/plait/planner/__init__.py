"""The planner: what fits, how fast, and why. Arithmetic alone: no process group, no GPU, no
environment, no network.
"""
