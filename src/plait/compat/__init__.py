"""APIs of other libraries on Plait's engine, for scripts that were written for them."""
