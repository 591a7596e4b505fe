"""What solves the bundled tasks: the files that an agent would have written."""

from __future__ import annotations

from experiments.settings.serving import TASKS

RANGES = """def parse_ranges(text):
    pages = set()
    for part in text.split(",") if text.strip() else []:
        ends = [int(end) for end in part.split("-")]
        if len(ends) > 2 or ends[0] < 1 or ends[-1] < ends[0]:
            raise ValueError(part)
        pages |= set(range(ends[0], ends[-1] + 1))
    return sorted(pages)
"""


def edited(task: str, name: str, *changes: tuple[str, str]) -> str:
    text = (TASKS / task / "start" / name).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


LEDGER = edited(
    "mend_ledger",
    "ledger.py",
    (
        "    each = round(cents / len(people))\n    return dict.fromkeys(people, each)\n",
        "    each, left = divmod(cents, len(people))\n"
        "    return {person: each + (place < left) for place, person in enumerate(people)}\n",
    ),
    ("            if person != payer:\n                owed[person] -= part\n", "            owed[person] -= part\n"),
)
SOLVED: dict[str, dict[str, str]] = {
    "write_ranges": {"ranges.py": RANGES},
    "mend_ledger": {"ledger.py": LEDGER},
    "rename_lookup": {
        "store.py": edited(
            "rename_lookup",
            "store.py",
            ("def get(self, article, place, default=0)", "def lookup(self, article, place, *, otherwise=0)"),
            ("(article, place), default)", "(article, place), otherwise)"),
            ("self.get(article, place, None)", "self.lookup(article, place, otherwise=None)"),
        ),
        "report.py": edited(
            "rename_lookup",
            "report.py",
            ("store.get(article", "store.lookup(article"),
            ("store.get(*key, default=0)", "store.lookup(*key, otherwise=0)"),
        ),
    },
}
ASKED = {"write_ranges": "print dialog takes", "mend_ledger": "Amounts are whole cents", "rename_lookup": "Rename the"}
"""A text of each task's prompt that no other has."""
