"""Generation in memory and within a budget of memory, compared with other libraries."""
