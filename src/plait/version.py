"""Plait's version, of which the wheel takes its own."""

__version__ = "0.1.0"
