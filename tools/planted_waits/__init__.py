"""Take every wait for a device out of the package, one at a time, and find the test that notices.

places.py    the waits, from the syntax tree
session.py   one session of pytest in which the tests run again for every wait
report.py    docs/development/waits.json and waits.md
"""
