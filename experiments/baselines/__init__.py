"""Other engines on the same card: each in an interpreter of its own, asked by a script and told apart by its log."""
