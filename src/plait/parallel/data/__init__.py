"""Data parallelism: ZeRO stages 0 to 3, the reduction of gradients, the selection and compression
of its collectives.
"""
