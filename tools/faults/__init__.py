"""Faults planted in real runs: what a run of Plait does about them, and after how long. See `__main__`."""
