"""Faults that other OpenAI-compatible servers had, and where they were reported; `@fault(n)` marks what holds them off.

`pytest -m fault` runs all of them. Where a fault can depend on it, a test asks streamed and not (`server_rig.chat`,
`complete`), with tokens that arrive one and several at a time.
"""

from __future__ import annotations

import pytest

fault = pytest.mark.fault

FAULTS: dict[int, tuple[str, str]] = {
    # stop strings
    1: ("a stop string fires inside the reasoning", "vllm-project/vllm/issues/53066"),
    2: ("a stop string in the reasoning leaks its end marker into content", "vllm-project/vllm/issues/14170"),
    3: ("pieces of a stop string are streamed before it is whole", "vllm-project/vllm/issues/3574"),
    4: ("text before a stop string in the same token is lost", "ggml-org/llama.cpp/pull/9867"),
    5: ("a stop string of several tokens is passed over", "ggml-org/llama.cpp/issues/11538"),
    # bytes and characters
    6: ("half a character is streamed", "vllm-project/vllm/issues/931"),
    7: ("an unfinished character at the end differs streamed and not", "ohdearquant/lattice/issues/751"),
    8: ("bytes that are no character end the stream", "Blaizzy/mlx-vlm/issues/1771"),
    # finish_reason, usage, chunks
    9: ("a call that max_tokens cut off is reported as finished", "vllm-project/vllm/issues/53269"),
    10: ("finish_reason tool_calls without a call", "vllm-project/vllm/issues/53255"),
    11: ("finish_reason stop after a call", "anomalyco/opencode/issues/20719"),
    12: ("a usage chunk that nobody asked for", "ggml-org/llama.cpp/issues/16048"),
    13: ("usage counts chunks, or one choice of several", "vllm-project/vllm/issues/8625"),
    14: ("a stream after a long prompt stalls, or lacks its end", "waybarrios/vllm-mlx/issues/101"),
    15: ("a chunk that the protocol does not know", "langwatch/tasks/issues/700"),
    16: ("a finish_reason that the protocol does not know", "dstackai/dstack/issues/2228"),
    # tools
    17: ("all parallel calls have index 0", "sgl-project/sglang/pull/38198"),
    18: ("ids of calls repeat over turns", "vllm-project/vllm/issues/50295"),
    19: ("a turn with calls and no content is dropped", "waybarrios/vllm-mlx/pull/611"),
    20: ("content as a list of parts is refused", "vllm-project/vllm/issues/25001"),
    21: ("control markers leak where no tools are given", "vllm-project/vllm/pull/56189"),
    22: ("the end of thinking and a call in one step lose text", "vllm-project/vllm/issues/43220"),
    23: ("the parser needs one token at a time", "vllm-project/vllm/issues/55082"),
    24: ("a marker spelled in ordinary tokens is taken for one", "vllm-project/vllm/issues/15758"),
    # limits and validation
    25: ("max_tokens beyond the context is refused, though it is a cap", "vllm-project/vllm/issues/42474"),
    26: ("no max_tokens means sixteen", "vllm-project/vllm/issues/6707"),
    27: ("an empty prompt ends the server", "vllm-project/vllm/issues/7283"),
    28: ("token ids outside the vocabulary reach the engine", "vllm-project/vllm/pull/16529"),
    29: ("a seed outside 64 bits ends the engine", "vllm-project/vllm/pull/4529"),
    30: ("a body that is no object is a 500", "vllm-project/vllm/pull/42961"),
    31: ("the developer role is refused", "ogx-ai/ogx/issues/6069"),
    32: ("fields that agents send are refused", "vllm-project/vllm/issues/42407"),
    # logprobs
    33: ("echo with logprobs gives the generated tokens alone", "ggml-org/llama.cpp/issues/27174"),
    34: ("an echo's tokens do not add up to its text", "vllm-project/vllm/issues/5334"),
    35: ("a chat's logprobs in the shape of completions", "vllm-project/vllm/issues/4795"),
    # lifetime
    36: ("the client has gone and the engine goes on", "ROCm/ATOM/pull/1441"),
    37: ("finished requests stay registered", "ROCm/ATOM/pull/1441"),
    38: ("an error amid a stream closes it without a word", "fr0ster/llm-agent/issues/22"),
    39: ("fewer choices than n", "vllm-project/vllm/issues/52398"),
    40: ("a greedy answer differs among other requests", "vllm-project/vllm/issues/11658"),
    41: ("the key guards some routes only", "vllm-project/vllm/issues/18892"),
}
