import unittest

from ledger import balances, share


class Ledger(unittest.TestCase):
    def test_shares_add_up(self):
        self.assertEqual(share(100, ["ann", "ben", "cem"]), {"ann": 34, "ben": 33, "cem": 33})

    def test_balances_add_up_to_nothing(self):
        found = balances([("ann", 100, ["ann", "ben"])])
        self.assertEqual(found, {"ann": 50, "ben": -50})


if __name__ == "__main__":
    unittest.main()
