"""Is the planner, calibrated on this machine, right about layouts that it has not seen here?"""
