"""A team of agents that talk in two turns each, written with the OpenAI SDK and nothing else.

It knows nothing of kvcmas, and runs against any server; what is reused stands in the usage.
"""

from __future__ import annotations

from typing import Any

from openai import OpenAI

AGENTS = {
    "planner": "You plan the work of a small team. You decide who looks at what.",
    "analyst": "You analyse texts with care: figures, names and dates, and what follows from them.",
    "critic": "You are a strict critic. You look for mistakes in what the others have written.",
    "judge": "You have the last word. You settle the matter in two sentences.",
}
TURNS = ("What matters most in this text?", "Now say it again in fewer words.")


def talk(base_url: str, model: str, text: str, tokens: int = 16) -> list[dict[str, Any]]:
    """Every agent reads the text and answers two turns; one row for each answer."""
    client = OpenAI(base_url=base_url, api_key="none")
    rows: list[dict[str, Any]] = []
    for agent, system in AGENTS.items():
        messages: Any = [{"role": "system", "content": system}]
        for turn, question in enumerate(TURNS, 1):
            content = f"{text}\n\n{question}" if turn == 1 else question
            messages.append({"role": "user", "content": content})
            answer = ""
            for chunk in client.chat.completions.create(
                model=model,
                messages=messages,
                temperature=0,
                max_tokens=tokens,
                stream=True,
                stream_options={"include_usage": True},
            ):
                if chunk.choices:
                    answer += chunk.choices[0].delta.content or ""
                if chunk.usage is not None:
                    details = chunk.usage.prompt_tokens_details
                    rows.append(
                        {
                            "agent": agent,
                            "turn": turn,
                            "prompt": chunk.usage.prompt_tokens,
                            "cached": (details.cached_tokens or 0) if details else 0,
                            "generated": chunk.usage.completion_tokens,
                        }
                    )
            messages.append({"role": "assistant", "content": answer})
    return rows
