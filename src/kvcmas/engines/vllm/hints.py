"""What a client may say about one request, in `kv_transfer_params`.

    {"kvcmas": {"agent": "critic", "dial": "fast", "reuse": true, "warm": false}}

All of it is optional. A hint that cannot be used is ignored and named in the request's record:
it never makes a request fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from kvcmas.engines.vllm.names import PARAMS_KEY
from kvcmas.errors import ConfigError
from kvcmas.methods.kvcmas.config import check_dial

_LONGEST_NAME = 200
_MOST_PROBLEMS = 8


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of one request.

    agent: who asks; `None` takes the name from the prompt's own first tokens.
    dial: how careful to be; `None` takes the server's.
    reuse: whether donors may be reused. `False` computes everything that vLLM's own prefix cache
        does not hold exactly.
    warm: serve exactly and keep what is computed as a donor for others; reuses nothing.
    problems: hints that were ignored, in words.
    """

    agent: str | None = None
    dial: str | None = None
    reuse: bool = True
    warm: bool = False
    problems: tuple[str, ...] = ()

    @property
    def reads(self) -> bool:
        """Whether the client lets this request reuse anything."""
        return self.reuse and not self.warm


_KNOWN = ("agent", "dial", "reuse", "warm")


def read_hints(params: Mapping[str, Any] | None) -> Hints:
    """Hints from a request's `kv_transfer_params`. Never raises."""
    given = params.get(PARAMS_KEY) if isinstance(params, Mapping) else None
    if given is None:
        return Hints()
    if not isinstance(given, Mapping):
        return Hints(
            problems=(
                f"hints ignored: kv_transfer_params[{PARAMS_KEY!r}] must be an object, got "
                f"{_shown(given)}",
            )
        )
    problems = [_unknown(name) for name in given if name not in _KNOWN]
    hints = Hints(
        agent=_agent(given.get("agent"), problems),
        dial=_dial(given.get("dial"), problems),
        reuse=_flag("reuse", given.get("reuse"), True, problems),
        warm=_flag("warm", given.get("warm"), False, problems),
        problems=tuple(problems[:_MOST_PROBLEMS]),
    )
    return hints


def _agent(value: object, problems: list[str]) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and value.isprintable():
        return value
    problems.append(
        f"hint agent ignored: expected a name of 1 to {_LONGEST_NAME} printable characters, got "
        f"{_shown(value)}"
    )
    return None


def _dial(value: object, problems: list[str]) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            check_dial(value[:_LONGEST_NAME])
        except ConfigError as error:
            problems.append(f"hint dial ignored: {error}")
            return None
        return value
    problems.append(f"hint dial ignored: expected a name, got {_shown(value)}")
    return None


def _flag(name: str, value: object, default: bool, problems: list[str]) -> bool:
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    problems.append(f"hint {name} ignored: expected true or false, got {_shown(value)}")
    return default


def _unknown(name: object) -> str:
    near = get_close_matches(str(name), _KNOWN, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(_KNOWN)}"
    return f"hint {_shown(name)} ignored: unknown; {hint}"


def _shown(value: object) -> str:
    """A value for a message: short, whatever the client sent."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
