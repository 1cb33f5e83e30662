"""Mutation testing with a committed list of defects: which test notices each of them, and how soon. `make mutants`."""
