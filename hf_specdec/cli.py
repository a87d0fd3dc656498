"""The command line: `hf-specdec inspect`, `hf-specdec bench`, `hf-specdec serve` and `hf-specdec doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .host.parts import why_broken
from .inspection.doctor import add_doctor


def build_parser() -> argparse.ArgumentParser:
    """The parser. Each subcommand sets a default `run`, a function of the parsed arguments that may return an exit
    status. A subcommand that sets `passes_on` gets unknown arguments in `others`."""
    parser = argparse.ArgumentParser(prog="hf-specdec", description="Speculative decoding for transformers.")
    parser.add_argument("--version", action="version", version=f"hf-specdec {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    add_doctor(subparsers)
    if why_broken() is None:  # else the other subcommands cannot be imported
        from .bench.command import add_bench
        from .inspection.report import add_inspect
        from .serving.server import add_serve

        for add in (add_inspect, add_bench, add_serve):
            add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        the exit status: the subcommand's, or 0 if it returns none; 1 after an `OSError` or `ValueError`, whose
        message is printed on stderr as one line.
    """
    parser = build_parser()
    arguments, others = parser.parse_known_args(argv)
    if others and not getattr(arguments, "passes_on", False):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    arguments.others = others
    try:
        return int(arguments.run(arguments) or 0)
    except (OSError, ValueError) as error:
        print(f"hf-specdec: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
