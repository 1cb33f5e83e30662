"""How far the planner is off, on published runs that it was not fitted to."""
