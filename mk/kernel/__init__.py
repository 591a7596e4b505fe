"""The kernel of csrc/ on a card: its library, buffers and launches, what it leaves of a step, and what goes wrong."""
