"""Code of all benchmarks: load of the machine, statistics, results, tables and workers."""
