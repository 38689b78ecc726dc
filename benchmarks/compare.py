"""Did fxfuse get slower? Compares ratios against eager, row by row; all the judging is in ``fxfuse.bench.compare``.

    python -m benchmarks.compare BEFORE.json AFTER.json
    python -m benchmarks.compare --base main -- geglu-mlp gpt2-like --vs eager

The first compares two files of ``fxfuse bench --json``. The second benches a revision and this checkout in turns, with
the arguments of ``fxfuse bench`` that follow ``--``. Exit codes: 0; 1 where a row is slower, or has no right answer any
more; 2 where nothing can be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fxfuse.bench import compare, revisions, schema
from fxfuse.bench.progress import Progress
from fxfuse.errors import FxfuseError

ROOT = Path(__file__).parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdicts and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "arguments", nargs="+", metavar="FILE", help="two files; with --base, arguments of fxfuse bench"
    )
    parser.add_argument("--base", metavar="REV", help="bench this revision and the checkout in turns")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="with --base: runs of each (default: 3)")
    parser.add_argument(
        "--margin", type=float, default=compare.MARGIN, metavar="R", help=f"least change that counts ({compare.MARGIN})"
    )
    options = parser.parse_args(argv)
    if not options.base and len(options.arguments) != 2:
        parser.error("two files are compared, or one revision with --base")
    if options.runs < 1:
        parser.error(f"--runs {options.runs}: there is nothing to compare without a run of each")
    try:
        if options.base:
            with Progress("compare") as progress:
                before, after = revisions.bench(
                    ROOT, options.base, options.arguments, runs=options.runs, progress=progress
                )
        else:
            before, after = ([schema.read(file, schema.BENCH)] for file in options.arguments)
    except (FxfuseError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    verdicts = compare.compare(before, after, options.margin)
    print(compare.table(verdicts))
    for line in compare.differences(before[0], after[0]):
        print(line)
    if not any(v.ranked for v in verdicts):
        print("compare: there is no row that stands in both and ran on quiet cores", file=sys.stderr)
        return 2
    return 1 if any(v.regression for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
