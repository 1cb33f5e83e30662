"""Version of Plait. The build of the wheel reads it from this file."""

__version__ = "0.1.0"
