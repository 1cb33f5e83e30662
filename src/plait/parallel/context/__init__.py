"""Context parallelism: each rank of the cp axis has a part of every sequence.

`techniques.context_parallel` is the technique. `kinds` splits sequences and implements the three
ways in which queries reach the keys of other ranks. `kernel` computes the attention of some queries
to some keys. `attention_function` is the function that models of Transformers call, and `families`
lists the supported models.
"""
