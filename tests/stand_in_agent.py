#!/usr/bin/env python3
"""In the place of a coding agent: asks the server as the real ones are told to, and does what it answers.

It takes the command lines and settings of OpenCode, Cline and Aider. The answer's lines are its orders: `write NAME
TEXT`, `run COMMAND`, `stay` (a child in a session of its own, and no end), `leave` (the same child, and an end),
`die`, `whole` (the next request is not streamed), `more` (ask again, with what the orders gave).
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def told():
    """(base URL, model, prompt)"""
    arguments = sys.argv[1:]
    known = Path(os.environ["HOME"], "known.json")
    if arguments == ["--version"]:
        print("stand-in 1.0")
        sys.exit()
    if arguments[0] == "auth":  # Cline
        known.write_text(json.dumps([arguments[arguments.index(name) + 1] for name in ("-b", "-m")]))
        sys.exit()
    if arguments[0] == "run":  # OpenCode
        settings = json.loads(Path(os.environ["OPENCODE_CONFIG"]).read_text())
        (provider,) = settings["provider"].values()
        return provider["options"]["baseURL"], next(iter(provider["models"])), arguments[1]
    if arguments[0] == "-t":
        return *json.loads(known.read_text()), arguments[2]
    model = arguments[arguments.index("--model") + 1].removeprefix("openai/")  # Aider
    return os.environ["OPENAI_API_BASE"], model, arguments[arguments.index("--message") + 1]


def ask(url, model, messages, whole):
    body = {"model": model, "messages": messages, "temperature": 0.0, "max_tokens": 500}
    if not whole:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    text, usages = "", 0
    with urllib.request.urlopen(request) as reply:
        if whole:
            return json.load(reply)["choices"][0]["message"]["content"]
        for line in reply:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    sys.exit(f"error: {chunk['error']}")
                usages += "usage" in chunk
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
    assert usages == 1, f"{usages} chunks with a usage, and one was asked for"
    return text


def do(order):
    verb, _, rest = order.partition(" ")
    if verb == "write":
        name, _, text = rest.partition(" ")
        Path(name).write_text(text.replace("\\n", "\n"))
        return f"wrote {name}"
    if verb == "run":
        done = subprocess.run(rest, shell=True, capture_output=True, text=True)
        return f"status {done.returncode} {done.stdout}{done.stderr}"
    if verb in ("stay", "leave"):
        child = subprocess.Popen(SLEEPER, start_new_session=True)
        Path("child").write_text(str(child.pid))
        print("a child stays", flush=True)
        if verb == "leave":
            sys.exit(0)
        time.sleep(600)
    if verb == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return ""


def main():
    url, model, prompt = told()
    print("environment", json.dumps(dict(os.environ)), flush=True)
    messages, whole = [{"role": "user", "content": prompt}], False
    while True:
        text = ask(url, model, messages, whole)
        print(text, flush=True)
        orders = text.splitlines()
        given = "".join(do(order) for order in orders)
        if "more" not in orders:
            return
        whole = "whole" in orders
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": given or "go on"}]


main()
