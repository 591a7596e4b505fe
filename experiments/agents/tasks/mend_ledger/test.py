import unittest

from ledger import balances, share


class Ledger(unittest.TestCase):
    def test_shares_add_up(self):
        self.assertEqual(share(100, ["ann", "ben", "cem"]), {"ann": 34, "ben": 33, "cem": 33})
        self.assertEqual(share(200, ["ann", "ben", "cem"]), {"ann": 67, "ben": 67, "cem": 66})
        for cents in range(40):
            parts = list(share(cents, "abcdefg").values())
            self.assertEqual(sum(parts), cents)
            self.assertEqual(parts, sorted(parts, reverse=True))
            self.assertLessEqual(parts[0] - parts[-1], 1)

    def test_who_pays_bears_a_share_too(self):
        self.assertEqual(balances([("ann", 100, ["ann", "ben"])]), {"ann": 50, "ben": -50})

    def test_who_pays_for_others_bears_none(self):
        self.assertEqual(balances([("ann", 90, ["ben", "cem"])]), {"ann": 90, "ben": -45, "cem": -45})

    def test_balances_add_up_to_nothing(self):
        trip = [("ann", 1001, ["ann", "ben", "cem"]), ("ben", 77, ["ann", "cem"]), ("cem", 5, ["cem"])]
        self.assertEqual(sum(balances(trip).values()), 0)
