"""Every private or unstable torch name that Plait needs, a file a theme; each has a test in
tests/unit/test_torch_names.py.

A new torch release is checked by running that test. What these files change in torch they call
patched behaviour. Nothing here holds state.
"""
