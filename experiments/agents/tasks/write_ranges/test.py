import unittest

from ranges import parse_ranges


class Ranges(unittest.TestCase):
    def test_numbers_and_ranges(self):
        self.assertEqual(parse_ranges("1-3,7,9-10"), [1, 2, 3, 7, 9, 10])
        self.assertEqual(parse_ranges("5"), [5])
        self.assertEqual(parse_ranges("4-4"), [4])

    def test_spaces(self):
        self.assertEqual(parse_ranges(" 2 - 4 , 6 "), [2, 3, 4, 6])

    def test_ascending_and_once(self):
        self.assertEqual(parse_ranges("9,1-3,2"), [1, 2, 3, 9])
        self.assertEqual(parse_ranges("10,9"), [9, 10])

    def test_nothing(self):
        self.assertEqual(parse_ranges(""), [])
        self.assertEqual(parse_ranges("   "), [])

    def test_everything_else(self):
        for text in ("1,,2", "3-1", "0", "0-2", "one", "1-", "-3", "1-2-3", ","):
            with self.subTest(text), self.assertRaises(ValueError):
                parse_ranges(text)
