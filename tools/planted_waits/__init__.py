"""Takes every wait for a device out of the package, one at a time, and reports which test of `tests/simulated_device` notices.

places.py    the waits, from the syntax tree
session.py   one session of pytest in which the tests run again for every wait
page.py      docs/development/waits.md
"""
