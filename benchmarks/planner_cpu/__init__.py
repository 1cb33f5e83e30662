"""Times that the planner, calibrated on this machine, predicts of other layouts."""
