"""Faults that are planted in real runs, and how runs of Plait handle them."""
