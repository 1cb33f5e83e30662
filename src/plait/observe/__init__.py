"""Observers of a run and drawings of a plan.

Listeners receive the events of a run (`plait.events`) and write them to a file or to the console.
The other modules draw pipeline schedules and the page of a plan. Nothing here changes what a run
computes.
"""
