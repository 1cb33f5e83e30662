"""Pipeline schedules: tables of computations, and the time that they take. Data only."""
