"""Mixed precision: compute and reduction dtypes, loss scaling, and low-bit optimizer states."""
