"""Context parallelism beside torch by hand."""
