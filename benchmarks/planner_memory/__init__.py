"""The planner's memory against dry runs of the engine itself."""
