"""The training run behind `plait train`: model and data from their sections, the loop, and a text
at the end. Prints nothing.
"""
