"""An agent program: it asks for the model by the ``openai`` client, and has a tool of its own.

    --env examples/environments/agent.py:Agent --reward_source environment --apply_chat_template

It needs ``pip install openenv openai``. A row has the question as its prompt, such as ``What is 17 *
23?``, and the number to find as its label.
"""

from __future__ import annotations

import json
import re
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class Agent:
    """Lets the model multiply until it answers."""

    answer = ""

    async def run(
        self, base_url: str, api_key: str, prompt: list[dict[str, Any]], label: str
    ) -> None:
        from openai import AsyncOpenAI

        self.label = label
        messages = [{"role": "system", "content": "Answer with a number."}, *prompt]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None) as client:
            while True:
                completion = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[TOOL]
                )
                said = completion.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    break
                for call in said.tool_calls:
                    told = result(call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
        self.answer = said.content or ""

    def get_reward(self) -> float:
        numbers = re.findall(r"-?\d+", self.answer)
        return float(numbers[-1:] == [self.label])


def result(name: str, arguments: str) -> str:
    """What the tool says. What is wrong with a call is text for the model: an exception would fail the episode."""
    given = json.loads(arguments)
    if name != "multiply" or {type(given.get("a")), type(given.get("b"))} != {int}:
        return "error: call multiply with two whole numbers a and b"
    return str(given["a"] * given["b"])
