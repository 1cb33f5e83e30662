"""Public bug reports of other projects, each run on Plait and in one plain process."""
