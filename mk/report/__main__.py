"""python -m mk.report    make figures"""

from __future__ import annotations

import sys

from mk.errors import MkError
from mk.report.page import draw
from mk.results.sources import ROOT


def main() -> int:
    """Exit status: 0, or 2 where the rows cannot be read."""
    try:
        written = draw(ROOT / "results")
    except MkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(str(path.relative_to(ROOT)) for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
