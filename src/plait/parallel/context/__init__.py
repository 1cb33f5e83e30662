"""Context parallelism: each rank of the cp axis has a part of every sequence.

`techniques.context_parallel` is the technique. `kinds` holds the split of a sequence and the three
ways in which queries reach the keys of other ranks, `kernel` the attention of some queries to some
keys, `attention_function` the function that Transformers' models call, and `families` the supported
models.
"""
