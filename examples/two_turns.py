"""Two turns of a long conversation, then the second one again as if nobody knew it. Needs the `openai` package.

    python examples/two_turns.py [http://127.0.0.1:8000/v1]

No conversation id is sent: kvflow recognises the messages. The last request carries an id that nobody has used, so its
history is unknown and the prefill node has to compute it. For the plain comparison, start kvflow with
`cluster.prefill.prefix_caching=false`: the prefill node is then one that never had the conversation.
"""

import sys
import time
from typing import Any

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
story = " ".join(f"Item {i} is a {('lamp', 'map', 'key')[i % 3]} in room {i * 7 % 100}." for i in range(130))


def turn(label: str, messages: list[Any], **extra: Any) -> str:
    begin, first, text = time.perf_counter(), 0.0, ""
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=messages, max_tokens=40, temperature=0, stream=True, extra_body=extra
    )
    for chunk in raw.parse():
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - begin
            text += chunk.choices[0].delta.content
    path, pulled = raw.headers["x-kvflow-path"], raw.headers["x-kvflow-pulled-tokens"]
    print(f"{label:<22} first token after {first:6.2f} s   path {path:<5} pulled {pulled:>5} tokens")
    return text


chat: list[Any] = [{"role": "user", "content": f"Remember this list. {story}"}]
answer = turn("turn 1", chat)
chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Where is the first lamp?"}]
turn("turn 2", chat)
turn("turn 2, history unknown", chat, conversation_id=f"new-{time.time_ns()}", cache_salt=f"new-{time.time_ns()}")
