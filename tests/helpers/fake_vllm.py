"""A program with the interface of `vllm serve`: it answers each chat with the JSON of the request that it got.

With a file FAKE_VLLM_FAILS in the environment it ends at its start, and prints a reason.
"""

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve", choices=["serve"])
    parser.add_argument("model")
    for name in ("--served-model-name", "--host", "--generation-config"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--gpu-memory-utilization", type=float, required=True)
    return parser.parse_args(argv)


class Handler(BaseHTTPRequestHandler):
    """Answers /health, and chats with the right key."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.headers["authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}"
        if body["messages"][-1]["content"] == "refuse":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": "too long for vLLM"}}).encode())
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        text = json.dumps(body)
        for piece in (text[:20], text[20:]):
            self._send({"choices": [{"delta": {"content": piece}, "finish_reason": None}]})
        if body["messages"][-1]["content"] == "break":
            return
        self._send({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self._send({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: dict) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    args = parse(sys.argv[1:])
    if os.environ.get("FAKE_VLLM_FAILS"):
        sys.exit("no GPU here")
    print(" ".join(sys.argv[1:]), flush=True)
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
