"""Continuous batching over a paged engine: requests come and go, each gets the tokens it would get alone.

`request` what is asked and where it stands, `logits` how the host picks a token, `prefix_cache` blocks that requests
share, `core` the scheduler, `worker` the thread that runs it, `scripted` a model that says what it is told to.
"""
