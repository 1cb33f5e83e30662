"""Access to the private and unstable names of torch, grouped by subject.

No other package of Plait uses a private name of torch. Every name has a test in
tests/unit/test_torch_names.py, which has to pass on every supported release. Docstrings of modules
that replace functions or attributes of torch list them as "patched behaviour". The code tests which
names exist instead of comparing version numbers.
"""
