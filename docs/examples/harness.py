"""A harness of your own: it begins groups at the gateway, plays their rollouts in threads, and ends them with a reward.

    rlbuffer run rlbuffer.toml                                      # its [gateway] names your vLLM server
    RLBUFFER_GATEWAY_TOKEN_FILE=~/.rlbuffer/runs/RUN/gateway.token python harness.py http://127.0.0.1:8400

The task has two turns: the model asks a tool for a digit, and says a larger one. Any loop of yours around OpenAI's
client may stand in place of `play`; it knows nothing of tokens, versions or the trainer.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import openai

GROUP_SIZE, GROUPS_AT_ONCE, DIGITS = 8, 4, 4
TOOL: Any = {
    "type": "function",
    "function": {"name": "digit", "description": "A digit.", "parameters": {"type": "object", "properties": {}}},
}


def token() -> str:
    """Of whoever begins and ends rollouts."""
    file = os.environ.get("RLBUFFER_GATEWAY_TOKEN_FILE")
    return Path(file).expanduser().read_text().strip() if file else os.environ.get("RLBUFFER_GATEWAY_TOKEN", "")


def post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token()}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def play(client: openai.OpenAI, opened: dict[str, Any], digit: int) -> None:
    """One rollout."""
    client = client.with_options(base_url=opened["base_url"])
    messages: list[Any] = [{"role": "user", "content": "Say a larger digit."}]
    try:
        for _ in range(2):
            asked: dict[str, Any] = {"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": 40}
            message = client.chat.completions.create(**asked).choices[0].message
            messages.append(message)
            for call in message.tool_calls or []:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(digit)})
            if not message.tool_calls:
                break
    except openai.APIStatusError as error:  # too old, or ended: the gateway has counted it as failed
        print(error.message, file=sys.stderr)
        return
    said = (message.content or "").strip()
    post(opened["end_url"], {"reward": float(said.isdecimal() and int(said) > digit)})


def main(url: str) -> None:
    """Plays until the run has no more tickets, and needs none."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=8)
    with ThreadPoolExecutor(GROUP_SIZE * GROUPS_AT_ONCE) as threads:

        def group() -> None:
            while True:
                try:
                    begun = post(f"{url}/v1/open_rollouts", {"env": "digits", "size": GROUP_SIZE, "wait": 30})
                except urllib.error.HTTPError as error:
                    if error.code != 503:  # 503: the run needs nothing now
                        raise
                    continue
                digit = begun["number"] % DIGITS
                list(threads.map(play, repeat(client), begun["open_rollouts"], repeat(digit)))

        with ThreadPoolExecutor(GROUPS_AT_ONCE) as groups:
            for done in [groups.submit(group) for _ in range(GROUPS_AT_ONCE)]:
                done.result()


if __name__ == "__main__":
    main(sys.argv[1])
