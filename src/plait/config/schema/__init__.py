"""Schema of the configuration file, as pydantic models. `config.Config` is the root.

The attribute docstrings of the models are the users' reference of every key.
"""
