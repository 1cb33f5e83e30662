"""Configuration of a run: one file that is read, checked against a schema, explained and resolved.

`resolving.resolve` has the two main functions: `load` returns a checked `Config`, and `resolve`
returns a `Resolved`, in which every value is determined. The package is pure: it uses no process
group and does not inspect the machine. Techniques do not import it.
"""
