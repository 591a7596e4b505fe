"""A decode step of a mixture-of-experts language model as one list of small tasks, from its weights to its checker."""
