"""Continuous batching over a paged engine: requests come and go, each gets the tokens it would get alone.

`request` what is asked and where it stands, `logits` how the host picks a token, `prefix_cache` blocks that requests
share, `seats` slots and pages, `core` the scheduler and its `policy`, `worker` the thread that runs it. What decodes
while the scheduler watches is a `mk.decode_loop.DecodeLoop`.
"""
