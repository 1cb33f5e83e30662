"""Measured memory and traffic of a run, which tests compare with the predictions."""
