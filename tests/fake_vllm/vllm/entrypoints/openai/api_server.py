"""In the place of vLLM's server: says what it was started with and, where its port is not 1, answers completions.

It counts what it answered under vLLM's name, streams a token each millisecond, and lets its worker be called where
vLLM does. `FAKE_VLLM=dies` ends it at once, `falls` at the first request, `short` has it generate a token less than it
was asked for, `alike` a worker that cannot take the weights; `parsers` has it refuse to stream without any, and others
with.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODE = os.environ.get("FAKE_VLLM")


class Server(BaseHTTPRequestHandler):
    model = ""
    answered = 0

    def do_GET(self):
        if self.path == "/metrics":
            line = f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {Server.answered}.0'
            self.reply(f"# TYPE vllm:request_success_total counter\n{line}\n".encode())
        elif self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": self.model, "max_model_len": 4096}]}).encode())
        else:
            self.reply(b"")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            return self.call(asked)
        if MODE == "falls":
            print("CUDA error: an illegal memory access", flush=True)
            os._exit(3)
        if self.path == "/tokenize":
            return self.reply(json.dumps({"count": length(asked)}).encode())
        Server.answered += 1
        if asked.get("stream"):
            return self.stream(asked)
        choice = {"text": "\n    pass", "finish_reason": "stop", "token_ids": [5, 4], "prompt_token_ids": [2]}
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        self.reply(json.dumps({"id": f"cmpl-{asked['seed']}", "choices": [choice], "usage": usage}).encode())

    def call(self, asked):
        assert os.environ["VLLM_SERVER_DEV_MODE"] == "1" and "--load-format=dummy" in sys.argv
        said = {"graph_mode": "FULL_AND_PIECEWISE", "compile_mode": "VLLM_COMPILE", "flash_attention": "3"}
        if asked["method"] == "mk_load_weights":
            assert os.path.exists(os.path.join(asked["args"][0], "config.json"))
            said = "alike: ValueError" if MODE == "alike" else "same"
        self.reply(json.dumps({"results": [said]}).encode())

    def stream(self, asked):
        parsers = [
            argument for argument in sys.argv if argument.startswith(("--reasoning-parser", "--tool-call-parser"))
        ]
        assert len(parsers) == 2 * (MODE == "parsers")  # they keep chunks back
        assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        tokens = max(1, asked["max_tokens"] - (MODE == "short"))
        prompt = length(asked)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.end_headers()
        for number in range(1, tokens + 1):
            time.sleep(0.001)
            usage = {"prompt_tokens": prompt, "completion_tokens": number}
            self.event({"choices": [{"index": 0, "text": "", "delta": {"content": ""}}], "usage": usage})
        usage["prompt_tokens_details"] = {"cached_tokens": 1}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, chunk):
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def length(asked):
    """In the place of tokens: ids, or characters of a conversation."""
    return len(asked.get("prompt", "")) or sum(len(str(each)) for each in asked["messages"])


if __name__ == "__main__":
    print("[unquantized.py:302] Using TRITON Unquantized MoE backend out of potential backends: (...).", flush=True)
    print(json.dumps({"arguments": sys.argv[1:], "offline": os.environ.get("HF_HUB_OFFLINE")}), flush=True)
    options = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    if MODE == "dies":
        sys.exit("no card")
    Server.model = options["served-model-name"]
    if int(options["port"]) > 1:
        ThreadingHTTPServer(("127.0.0.1", int(options["port"])), Server).serve_forever()
