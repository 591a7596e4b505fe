"""Where code that a model wrote is run: as nobody, without a network, in a folder of its own, for a short while."""
