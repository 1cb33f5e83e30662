"""Pipeline schedules as tables of computations, and the time that they take.

`schedule` makes the tables, `actions` defines their entries, and `timeline` simulates them. Nothing
here runs a model.
"""
