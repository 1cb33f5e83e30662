"""Kernels that attention launches under context parallelism, beside a ring written by hand."""
