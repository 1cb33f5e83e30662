"""Access to the private and unstable names of torch, grouped by subject.

No other package of Plait uses a private name of torch. Every name has a test in
tests/unit/test_torch_names.py, so a new release of torch is checked by running that file. Modules
that replace functions or attributes of torch call the result "patched behaviour". Code asks which
names exist instead of comparing version numbers.
"""
