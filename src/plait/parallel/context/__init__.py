"""Context parallelism: each rank of the cp axis has a part of every sequence.

`techniques.context_parallel` is the technique. `kinds` splits sequences, and has three
implementations of attention to the keys of other ranks. `kernel` computes the attention of a block
of queries to a block of keys. `attention_function` is the function that models of Transformers
call, and `families` lists the supported models.
"""
