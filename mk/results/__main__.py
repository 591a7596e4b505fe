"""Results that are kept.

python -m mk.results promote ID[,ID...]  make promote run=ID[,ID...]
python -m mk.results verify              make verify-results
"""

from __future__ import annotations

import sys
from pathlib import Path

from mk.errors import MkError
from mk.results.promote import prepare
from mk.results.sources import ROOT
from mk.results.verify import verify


def main(argv: list[str]) -> int:
    """Exit status: 0, 1 where verify finds something wrong, 2 for a wrong input."""
    results = ROOT / "results"
    try:
        if len(argv) == 2 and argv[0] == "promote":
            if not all(run.strip() for run in argv[1].split(",")):
                raise MkError(
                    f"run={argv[1]} names a run that is empty", hint="make promote run=<the name of a folder in runs/>"
                )
            runs = [Path(run) if Path(run).is_dir() else ROOT / "runs" / run for run in argv[1].split(",")]
            if len({run.resolve().name for run in runs}) < len(runs):
                raise MkError(f"{argv[1]} names a run twice")
            prepared = [part for run in runs for part in prepare(run, results)]  # all are sound before one is written
            print("\n".join(str(part.write()) for part in prepared))
            return 0
        if argv != ["verify"]:
            raise MkError("promote RUN[,RUN...], or verify", hint="make promote run=ID[,ID...], make verify-results")
    except MkError as error:
        print(f"error: {error}" + f"\nhint: {error.hint}" * bool(error.hint), file=sys.stderr)
        return 2
    problems, notes = verify(results, ROOT / "README.md")
    print("\n".join([*(f"note: {note}" for note in notes), *(f"WRONG: {problem}" for problem in problems)]))
    print(f"{len(problems)} wrong" if problems else "all that can be computed again is as it stands")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
