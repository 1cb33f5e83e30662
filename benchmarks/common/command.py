"""The command line of a benchmark: `python -m benchmarks.NAME [--quick]`."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter


def command(name: str, description: str | None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, to check that everything runs; writes nothing",
    )
    return parser
