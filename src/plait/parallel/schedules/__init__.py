"""Pipeline schedules as tables of computations, and the time that they take.

`schedule` generates and checks the tables, and `timeline` simulates them. This package runs no
model.
"""
