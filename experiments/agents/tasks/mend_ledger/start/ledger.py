"""Who owes what after a trip: every expense was paid by one person and is shared by some."""

from collections import defaultdict


def share(cents, people):
    """What each of `people` has to bear of an amount."""
    each = round(cents / len(people))
    return dict.fromkeys(people, each)


def balances(expenses):
    """What each person is owed, in cents; negative where they owe. expenses: (payer, cents, people that share it)."""
    owed = defaultdict(int)
    for payer, cents, people in expenses:
        owed[payer] += cents
        for person, part in share(cents, people).items():
            if person != payer:
                owed[person] -= part
    return dict(owed)
