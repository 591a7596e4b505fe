"""The OpenAI-compatible server: requests in, prompts by the model's template, tokens parsed, chunks and answers out.

`protocol` what requests may hold, `prompts` messages to tokens, `generation` the way to the engine and back, `choice`
tokens to an answer (`parser`, `actions`, `stops`), `chat` and `completions` the two endpoints, `app` the rest.
"""
