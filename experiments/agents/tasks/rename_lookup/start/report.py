"""What is in stock, as lines of text."""

NAMES = {"nut": "Nuts", "bolt": "Bolts"}


def line(store, article):
    """Of one article, with its places."""
    name = NAMES.get(article, article)
    counts = [f"{place} {store.get(article, place)}" for place in store.places(article)]
    return f"{name}: {', '.join(counts) or 'none'}"


def missing(store, wanted):
    """What has to be ordered, by article and place. wanted: how many there should be."""
    short = {key: count - store.get(*key, default=0) for key, count in wanted.items()}
    return {key: count for key, count in short.items() if count > 0}
