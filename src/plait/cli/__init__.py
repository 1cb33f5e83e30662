"""Command line of Plait: one module per verb.

No other package of Plait imports this one.
"""
