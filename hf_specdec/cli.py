"""The command line: `hf-specdec inspect` and `hf-specdec bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .bench import add_bench
from .inspection.report import add_inspect

# Each adds one subcommand's parser, whose default `run` takes the parsed arguments and prints.
SUBCOMMANDS: tuple[Callable[[argparse._SubParsersAction], None], ...] = (add_inspect, add_bench)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-specdec", description="Speculative decoding for transformers.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for add in SUBCOMMANDS:
        add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 on success, 1 with one line on stderr if something is wrong with what was asked for."""
    arguments = build_parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (OSError, ValueError) as error:
        print(f"hf-specdec: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
