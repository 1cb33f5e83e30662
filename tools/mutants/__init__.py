"""Mutation testing: defects are planted one at a time, and tests must notice them."""
