import inspect
import unittest

import report
from store import Store


class Rename(unittest.TestCase):
    def setUp(self):
        self.store = Store()
        self.store.add("nut", "shelf", 3)
        self.store.add("nut", "shelf", 2)
        self.store.add("nut", "cellar", 0)

    def test_new_name(self):
        self.assertEqual(self.store.lookup("nut", "shelf"), 5)
        self.assertEqual(self.store.lookup("bolt", "shelf"), 0)
        self.assertIsNone(self.store.lookup("bolt", "shelf", otherwise=None))

    def test_by_name_alone(self):
        parameters = inspect.signature(Store.lookup).parameters
        self.assertEqual(list(parameters), ["self", "article", "place", "otherwise"])
        self.assertEqual(parameters["otherwise"].kind, inspect.Parameter.KEYWORD_ONLY)

    def test_old_name_is_gone(self):
        self.assertFalse(hasattr(Store, "get"))

    def test_uses(self):
        self.assertTrue(self.store.has("nut", "cellar"))
        self.assertFalse(self.store.has("bolt", "cellar"))
        self.assertEqual(report.line(self.store, "nut"), "Nuts: cellar 0, shelf 5")
        self.assertEqual(report.line(self.store, "gear"), "gear: none")
        self.assertEqual(report.missing(self.store, {("nut", "shelf"): 9, ("nut", "cellar"): 0}), {("nut", "shelf"): 4})
