"""Mutation testing with a committed catalogue: which test notices each defect, and how soon."""
