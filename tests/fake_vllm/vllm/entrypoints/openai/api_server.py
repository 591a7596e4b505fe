"""In the place of vLLM's server: says what it was started with and, where its port is not 1, answers completions.

`FAKE_VLLM=dies` ends it at once. It counts what it answered under vLLM's name.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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
        Server.answered += 1
        choice = {"text": "\n    pass", "finish_reason": "stop", "token_ids": [5, 4], "prompt_token_ids": [2]}
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        self.reply(json.dumps({"id": f"cmpl-{asked['seed']}", "choices": [choice], "usage": usage}).encode())

    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    print(json.dumps({"arguments": sys.argv[1:], "offline": os.environ.get("HF_HUB_OFFLINE")}), flush=True)
    options = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    if os.environ.get("FAKE_VLLM") == "dies":
        sys.exit("no card")
    Server.model = options["served-model-name"]
    if int(options["port"]) > 1:
        ThreadingHTTPServer(("127.0.0.1", int(options["port"])), Server).serve_forever()
