"""Observers of a run and drawings of a plan.

Listeners receive the events of a run (`plait.events`) and write them to a file or to the console.
`schedule` draws pipeline schedules, and `residual` compares a run with its plan. Nothing here
changes what a run computes.
"""
