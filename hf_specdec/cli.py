"""The command line: `hf-specdec inspect`, `hf-specdec bench` and `hf-specdec serve`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .bench import add_bench
from .inspection.report import add_inspect
from .serve import add_serve

# Each adds the parser of one subcommand and sets its default `run`, a function of the parsed arguments. One that sets
# `passes_on` gets arguments that it does not know in `others`.
SUBCOMMANDS: tuple[Callable[[argparse._SubParsersAction], None], ...] = (add_inspect, add_bench, add_serve)


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
    parser = build_parser()
    arguments, others = parser.parse_known_args(argv)
    if others and not getattr(arguments, "passes_on", False):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    arguments.others = others
    try:
        arguments.run(arguments)
    except (OSError, ValueError) as error:
        print(f"hf-specdec: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
