"""A reward service for `data.services`, with only the standard library. Copy it, and
write your own judgement into `scores`.

    REWARD_KEY=secret python examples/reward_server.py --port 8100
    REWARD_KEY=secret python examples/reward_server.py --port 8100 \
        --classify http://127.0.0.1:30000

By default it compares texts. With --classify it queries a reward model served by SGLang
(`python -m sglang.launch_server --model-path MODEL --is-embedding`), which gives one
number for prompt and completion. Without REWARD_KEY anybody may query it.
"""

import argparse
import hmac
import json
import os
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = os.environ.get("REWARD_KEY", "")
CLASSIFY_LIMIT_S = 60.0


def scores(items: list[dict[str, str]], classify: str) -> list[float | None]:
    """Return a number for each item {"task", "prompt", "completion", "answer",
    "expected"}, or None if it cannot be judged.
    """
    if not classify:
        return [
            1.0 if item["answer"].strip() == item["expected"].strip() else -1.0 for item in items
        ]
    body = json.dumps({"text": [item["prompt"] + item["completion"] for item in items]}).encode()
    request = urllib.request.Request(
        f"{classify}/classify", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=CLASSIFY_LIMIT_S) as reply:
        return [result["embedding"][0] for result in json.load(reply)]


class Handler(BaseHTTPRequestHandler):
    classify = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if KEY and not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {KEY}"):
            return self.answer(401, {"error": "wrong key"})
        try:
            items = json.loads(body)["items"]
        except (ValueError, KeyError, TypeError):
            return self.answer(400, {"error": 'give {"items": [...]}'})
        try:
            rewards = scores(items, self.classify)
        except OSError as error:
            return self.answer(503, {"error": f"the reward model does not answer: {error}"})
        return self.answer(200, {"rewards": rewards})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument(
        "--classify", default="", help="URL of an SGLang server with a reward model"
    )
    options = parser.parse_args()
    Handler.classify = options.classify
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    print(f"rewards at http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
