"""Text, its tokenizer, packed sequences, and a loader whose order is a function of its position.
Knows no model and no process group.
"""
