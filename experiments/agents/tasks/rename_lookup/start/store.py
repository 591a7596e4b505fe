"""Stock by article and place."""


class Store:
    def __init__(self):
        self._counts = {}

    def add(self, article, place, count):
        self._counts[article, place] = self._counts.get((article, place), 0) + count

    def get(self, article, place, default=0):
        return self._counts.get((article, place), default)

    def has(self, article, place):
        return self.get(article, place, None) is not None

    def places(self, article):
        return sorted(place for known, place in self._counts if known == article)
