"""Mixed precision: compute and reduction dtypes, loss scaling, low-bit optimizer states."""
