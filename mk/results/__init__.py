"""Rows: what a run measured, the folder it leaves, and what is kept of it and computed again."""
