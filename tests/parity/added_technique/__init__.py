"""A technique from outside of Plait, as docs/add-a-technique.md adds it."""
