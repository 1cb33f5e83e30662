"""What `plait doctor --validate` runs: checks of Plait on this machine's GPUs, each with a result,
and the document that they make.
"""
