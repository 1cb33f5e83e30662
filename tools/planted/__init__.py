"""What `tools.mutants`, `tools.planted_waits` and `tools.faults` share.

Each of the three plants defects from a catalogue of its own. `project` runs commands with a time
limit, in the project or in a copy of it. Results and pages are written by
`benchmarks.common.report`.
"""
