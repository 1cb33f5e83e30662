"""The one file: read, checked, explained and resolved. Pure; techniques do not know it."""
