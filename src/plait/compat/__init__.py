"""Other libraries' calls over Plait's engine, for scripts that were written for them."""
