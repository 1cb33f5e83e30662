"""Expert parallelism beside torch by hand."""
