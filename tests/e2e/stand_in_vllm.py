"""Stands in for vLLM: listens, logs, has a stubborn child, and starts in a moment."""

import http.server
import json
import os
import pathlib
import subprocess
import sys
import time

args = sys.argv[1:]
state = pathlib.Path(os.environ["STAND_IN"])
helper = subprocess.Popen(
    [
        sys.executable,
        "-c",
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)",
    ]
)
(state / "seen.tmp").write_text(
    json.dumps({"pids": [os.getpid(), helper.pid], "args": args, "env": dict(os.environ)})
)
(state / "seen.tmp").rename(state / "seen.json")
print("INFO Initializing a V1 LLM engine", flush=True)
if "--fail" in args:
    helper.kill()
    print("\n".join(f"line {i}" for i in range(30)))
    print("kvist.core.errors.UnsupportedError: the model hums; serve it without Kvist")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(7)
if "--never" in args:
    time.sleep(600)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *a):
        print("chatter", flush=True)


port = int(args[args.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
print("Loading safetensors checkpoint shards", flush=True)
server.serve_forever()
