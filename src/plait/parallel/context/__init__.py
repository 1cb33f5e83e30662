"""Context parallelism: the ranks of the cp axis have a part of every sequence each."""
