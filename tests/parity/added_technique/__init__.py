"""A technique from outside of Plait, as docs/how-to/add-a-technique.md adds it."""
