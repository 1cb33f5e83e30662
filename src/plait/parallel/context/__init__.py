"""Context parallelism: the ranks of the cp axis each have a part of every sequence.

`context_parallel` holds the technique, `layout` the cut of a sequence, `kinds` the three ways in
which queries reach the keys of other ranks, `kernel` the attention of some queries to some keys,
`interface` the function that Transformers' models call, and `families` the supported models.
"""
