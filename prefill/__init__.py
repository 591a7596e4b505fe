"""Prefill: from a prompt's tokens to its KV pages, in the layout that the decode step reads."""
