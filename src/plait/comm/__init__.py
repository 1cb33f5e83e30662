"""Communication between ranks.

The package has the collectives and messages that techniques call, all-reduce algorithms and the
choice between them by measured costs, compressed reductions, reductions in memory that the ranks of
one machine share, and the detection of hangs.
"""
