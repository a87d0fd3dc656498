"""The command line: `hf-specdec inspect` and `hf-specdec bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .bench import add_bench
from .inspection.report import add_inspect

# Each adds the parser of one subcommand and sets its default `run`, a function of the parsed arguments.
SUBCOMMANDS: tuple[Callable[[argparse._SubParsersAction], None], ...] = (add_inspect, add_bench)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-specdec", description="Speculative decoding for transformers.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for add in SUBCOMMANDS:
        add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        exit status: 0 on success, 1 after an `OSError` or `ValueError`, whose message is printed on stderr as one line.
    """
    arguments = build_parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (OSError, ValueError) as error:
        print(f"hf-specdec: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
