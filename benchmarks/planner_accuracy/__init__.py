"""Errors of the planner on published runs that it was not fitted to."""
