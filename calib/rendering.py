"""From logged requests to the text that the model saw: the chat template, and the system prompts of production.

Owns what counts as a system prompt and where one is put in front of a request that has none. It does not choose
requests (see `selection`) and makes no tokens.

A system prompt is a system turn that is not blank, or instructions that the first user turn begins with: makers of
reasoning models such as DeepSeek-R1 ask for them there (model card, "Usage Recommendations"), and some templates refuse
or silently drop a system turn. Both are found out by rendering.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from harness.calib.language import kind_of_text
from harness.calib.traffic import TrafficRequest, Turns
from harness.errors import RequestError
from harness.tokenizer import Tokenizer

# Some templates write today's date; with it the same traffic would give another set every day.
FIXED_DATE = datetime(2025, 1, 1)
_PROBE = "vqzx system probe vqzx"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A rendered request. `system_prompt` is empty without one; `body` is what stands beside it, unrendered."""

    text: str
    body: str
    system_prompt: str
    language: str
    key: int
    count: int


@dataclass(frozen=True, kw_only=True)
class RenderedTraffic:
    """Prompts in the order of their keys, requests that the chat template refused, and how many got a system prompt."""

    prompts: tuple[Prompt, ...]
    num_refused: int
    num_prompts_added: int


def render_traffic(
    requests: Sequence[TrafficRequest], tokenizer: Tokenizer, *, system_prompts: Sequence[str] = ()
) -> RenderedTraffic:
    """Render requests; those without a system prompt get one of `system_prompts`, in turn."""
    prompts: list[Prompt] = []
    num_refused = num_added = 0
    takes_system = shows_system_turn(tokenizer)
    in_user_turn = not takes_system or _prompts_open_user_turns(requests, system_prompts)
    for request in requests:
        system, body = _split(request.turns, system_prompts)
        turns = list(request.turns)
        if not system and system_prompts:
            system = system_prompts[num_added % len(system_prompts)]
            turns = _with_prompt(body, system, in_user_turn=in_user_turn)
            num_added += 1
        elif not takes_system and any(role == "system" for role, _ in turns):
            # what a system turn says goes where this model reads it
            turns = _with_prompt(body, system, in_user_turn=True) if system else body
        text = _render(turns, tokenizer)
        if text is None:
            num_refused += 1
            continue
        said = "\n".join(content for _, content in body)
        prompts.append(
            Prompt(
                text=text,
                body=said,
                system_prompt=system if system in text.replace("\r\n", "\n") else "",
                language=kind_of_text(said),
                key=request.key,
                count=request.count,
            )
        )
    return RenderedTraffic(prompts=tuple(prompts), num_refused=num_refused, num_prompts_added=num_added)


def shows_system_turn(tokenizer: Tokenizer) -> bool:
    """Whether the chat template takes a system turn and writes it; true without one, where all turns are joined."""
    if tokenizer.chat_template is None:
        return True
    turns = [("system", _PROBE), ("user", "x")]
    return _PROBE in (_template_text(turns, tokenizer) or "")


def _split(turns: Sequence[tuple[str, str]], system_prompts: Sequence[str]) -> tuple[str, Turns]:
    """The system prompt that a request came with, or an empty one, and the turns without it."""
    said = "\n\n".join(text.replace("\r\n", "\n").strip() for role, text in turns if role == "system" and text.strip())
    body = [(role, text) for role, text in turns if role != "system"]
    if said or not body:
        return said, body
    role, first = body[0]
    first = first.replace("\r\n", "\n").lstrip()
    # the longest: one prompt may be the beginning of another
    prompt = max((p for p in system_prompts if first.startswith(p)), key=len, default="")
    return prompt, [(role, first[len(prompt) :].lstrip()), *body[1:]] if prompt else body


def _prompts_open_user_turns(requests: Sequence[TrafficRequest], system_prompts: Sequence[str]) -> bool:
    in_system = sum(bool(_split(request.turns, ())[0]) for request in requests)
    anywhere = sum(bool(_split(request.turns, system_prompts)[0]) for request in requests)
    return anywhere - in_system > in_system


def _with_prompt(body: Turns, prompt: str, *, in_user_turn: bool) -> Turns:
    role, first = body[0]
    if role == "text" or (in_user_turn and role == "user"):
        return [(role, f"{prompt}\n\n{first}"), *body[1:]]
    return [("user", prompt), *body] if in_user_turn else [("system", prompt), *body]


def _render(turns: Turns, tokenizer: Tokenizer) -> str | None:
    """The text of a request, None where the chat template accepts it in no form."""
    if turns[0][0] == "text" or tokenizer.chat_template is None:
        return "\n\n".join(text for _, text in turns)
    text = _template_text(turns, tokenizer)
    return text if text is not None else _template_text(_alternating(turns), tokenizer)


def _template_text(turns: Turns, tokenizer: Tokenizer) -> str | None:
    messages = [{"role": role, "content": text} for role, text in turns]
    try:
        return tokenizer.render_chat(
            messages, add_generation_prompt=turns[-1][0] != "assistant", strftime_now=FIXED_DATE.strftime
        )
    except RequestError:
        return None


def _alternating(turns: Turns) -> Turns:
    """The same text for templates that know only users and assistants who take turns."""
    merged: Turns = []
    for role, text in turns:
        role = role if role == "assistant" or (role == "system" and not merged) else "user"
        if merged and merged[-1][0] == role:
            merged[-1] = (role, f"{merged[-1][1]}\n\n{text}")
        else:
            merged.append((role, text))
    return merged
