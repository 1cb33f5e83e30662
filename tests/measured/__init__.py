"""What a run holds, sends and computes, measured: the other side of the accounts that tests compare."""
