"""Items of the instruction following task: a small thing to write, and one or two rules that can be checked."""

from __future__ import annotations

from random import Random
from typing import Any

Rule = tuple[str, dict[str, Any]]

TOPICS = (
    "dogs", "the sea", "coffee", "winter", "trains", "bread", "music", "the Moon", "gardens", "football", "books",
    "mountains", "rain", "bicycles", "cats", "apples", "school", "birds", "rivers", "cities", "tea", "forests",
)  # fmt: skip
ZH_TOPICS = ("狗", "大海", "咖啡", "冬天", "火车", "面包", "音乐", "月亮", "花园", "足球", "书", "山")

# what is asked for, and rules that may be joined to it; {x} is a word drawn
TASKS = (
    "Write one sentence about {topic}.",
    "Write two sentences about {topic}.",
    "Tell me something about {topic}.",
    "Describe {topic} to a child.",
    "Write a short note about {topic}.",
)
RULES: tuple[Rule, ...] = (
    ("Use at most 20 words.", {"kind": "words", "at_most": 20}),
    ("Use at most 40 words.", {"kind": "words", "at_most": 40}),
    ("Do not use commas.", {"kind": "excludes", "texts": [","]}),
    ("Do not use the word '{x}'.", {"kind": "excludes", "texts": ["{x}"]}),
    ("Use the word '{x}'.", {"kind": "includes", "texts": ["{x}"]}),
    ("Start with the words 'Here is'.", {"kind": "starts_with", "text": "Here is"}),
    ("Start with the word 'Well'.", {"kind": "starts_with", "text": "Well"}),
    ("End with the words 'That is all.'", {"kind": "ends_with", "text": "That is all."}),
    ("End with a question mark.", {"kind": "ends_with", "text": "?"}),
    ("Use capital letters only.", {"kind": "case", "case": "upper"}),
    ("Use small letters only.", {"kind": "case", "case": "lower"}),
    ("Put it in double quotes.", {"kind": "starts_with", "text": '"'}),
    ("Answer in Chinese.", {"kind": "script", "script": "Chinese"}),
)
WORDS = ("happy", "water", "green", "friend", "morning", "because", "little", "very", "people", "world")
LISTS: tuple[Rule, ...] = (
    ("List 3 things about {topic} as bullet points with '-'.", {"kind": "bullets", "at_least": 3, "at_most": 3}),
    ("Give exactly two bullet points about {topic}, with '*'.", {"kind": "bullets", "at_least": 2, "at_most": 2}),
    (
        "Answer with a JSON object with the keys \"title\" and \"text\" about {topic}.",
        {"kind": "json", "keys": ["title", "text"]},
    ),
    ("Name one word that has to do with {topic}. Answer with one word only.", {"kind": "words", "at_most": 1}),
    ("Write exactly one sentence about {topic}.", {"kind": "sentences", "at_least": 1, "at_most": 1}),
)  # fmt: skip
ZH_RULES: tuple[Rule, ...] = (
    ("用一句话介绍{topic}。", {"kind": "sentences", "at_least": 1, "at_most": 1}),
    ("介绍一下{topic}，不超过30个字。", {"kind": "words", "at_most": 30}),
    ("介绍一下{topic}，不要使用逗号。", {"kind": "excludes", "texts": ["，", ","]}),
    ("介绍一下{topic}，以“好的”开头。", {"kind": "starts_with", "text": "好的"}),
    ("列出关于{topic}的三点，每点以“-”开头。", {"kind": "bullets", "at_least": 3, "at_most": 3}),
    ("Write one sentence about {topic} in English.", {"kind": "script", "script": "Latin"}),
)


def items(rng: Random) -> list[dict[str, Any]]:
    """60 tasks with rules, 25 forms, and 24 in Chinese."""
    made = []
    for number in range(60):
        rules = [RULES[number % len(RULES)]]
        if number % 3 == 0:
            rules.append(rng.choice([rule for rule in RULES if rule[1]["kind"] != rules[0][1]["kind"]]))
        word, topic = rng.choice(WORDS), rng.choice(TOPICS)
        texts = [text.replace("{x}", word) for text, _ in rules]
        asked = " ".join([TASKS[number % len(TASKS)].format(topic=topic), *texts])
        made.append(_item(f"en-{number + 1:02}", asked, [_with_word(rule, word) for _, rule in rules]))
    for number in range(25):
        asked, rule = LISTS[number % len(LISTS)]
        made.append(_item(f"form-{number + 1:02}", asked.replace("{topic}", TOPICS[number % len(TOPICS)]), [rule]))
    for number in range(24):
        asked, rule = ZH_RULES[number % len(ZH_RULES)]
        topic = ZH_TOPICS[(number + 5 * (number // len(ZH_RULES))) % len(ZH_TOPICS)]
        made.append(_item(f"zh-{number + 1:02}", asked.replace("{topic}", topic), [rule]))
    return made


def _with_word(rule: dict[str, Any], word: str) -> dict[str, Any]:
    if "texts" not in rule:
        return rule
    return {**rule, "texts": [text.replace("{x}", word) for text in rule["texts"]]}


def _item(item_id: str, prompt: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": item_id, "prompt": prompt, "instructions": rules}
