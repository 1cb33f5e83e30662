"""Other libraries' APIs on top of Plait's engine, for scripts written for those libraries."""
