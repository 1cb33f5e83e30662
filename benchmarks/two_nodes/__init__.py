"""Training steps over a slow link between two network namespaces."""
