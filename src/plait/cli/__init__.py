"""Command line of Plait: one module per command.

No other package of Plait imports this one.
"""
