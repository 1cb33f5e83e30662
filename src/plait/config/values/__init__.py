"""Types and rules of single values: numbers, paths, names, and parameters of torch classes.

Error messages of pydantic are translated here into a rule and a remedy.
"""
