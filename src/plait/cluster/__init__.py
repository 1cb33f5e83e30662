"""Machines, processes and devices of a run, and the process groups between them.

`topology` finds the place of this process from the launcher's variables. `layout` computes
coordinates and groups of ranks, and `mesh` creates the process groups. `accelerator` has everything
that depends on the kind of device.
"""
