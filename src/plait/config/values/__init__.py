"""What a value may look like: numbers, names and their misspellings, the parameters of a torch
class.
"""
