"""Entry point of `python -m plait`, which is the same as the command `plait`."""

from plait.cli.main import main

main()
