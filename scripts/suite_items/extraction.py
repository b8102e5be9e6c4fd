"""Items of the extraction task: a sentence or two, and the fields to take out of it."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from words import (
    CITIES,
    COMPANIES,
    DAYS,
    JOBS,
    MONTHS,
    NAMES,
    THINGS,
    TOPICS,
    WEATHER,
    ZH_CITIES,
    ZH_COMPANIES,
    ZH_DAYS,
    ZH_JOBS,
    ZH_NAMES,
    ZH_THINGS,
    ZH_TOPICS,
    ZH_WEATHER,
)

Fields = dict[str, Any]

# each template names its fields; those that are words of a list are filled from it, the others are numbers
ENGLISH = (
    "{name} from {city} ordered {quantity} {item} for {price} euros.",
    "We have a new order: {quantity} {item} at {price} euros, to be sent to {name} in {city}.",
    "The {topic} meeting with {name} is on {day} at {time} in room {room}.",
    "Please come to room {room} on {day} at {time}. {name} will talk about {topic}.",
    "Invoice {number}: {company} has to pay {amount} dollars by {date}.",
    "{company} paid {amount} dollars on {date} for invoice {number}.",
    "It will be {weather} in {city} on {day}, with a high of {degrees} degrees.",
    "Flight {flight} to {city} leaves at {time} from gate {gate}.",
    "{name} works as a {job} at {company}. The extension is {extension}.",
    "{company} is looking for a {job} in {city}. The job starts on {date} and pays {salary} dollars a month.",
    "On {date} {name} bought a house in {city} for {price} dollars.",
    "The train to {city} leaves platform {platform} at {time} and arrives on {day}.",
)
CHINESE = (
    "{姓名}在{城市}订购了{数量}个{商品}，总价{总价}元。",
    "新订单：{商品}{数量}个，总价{总价}元，收货人{姓名}，寄往{城市}。",
    "{主题}会议定于{日期}{时间}在{房间}会议室举行，由{姓名}主持。",
    "航班{航班}将于{时间}飞往{城市}，登机口是{登机口}。",
    "{姓名}是{公司}的{职位}，分机号是{分机号}。",
    "{日期}{城市}天气{天气}，最高气温{气温}度。",
    "{公司}应付款{金额}元，发票号是{发票号}，联系人{姓名}。",
    "{公司}在{城市}招聘{职位}，月薪{月薪}元。",
)
_LISTS: dict[str, tuple[str, ...]] = {
    "name": NAMES,
    "city": CITIES,
    "item": THINGS,
    "topic": TOPICS,
    "day": DAYS,
    "company": COMPANIES,
    "weather": WEATHER,
    "job": JOBS,
    "姓名": ZH_NAMES,
    "城市": ZH_CITIES,
    "商品": ZH_THINGS,
    "主题": ZH_TOPICS,
    "日期": ZH_DAYS,
    "公司": ZH_COMPANIES,
    "职位": ZH_JOBS,
    "天气": ZH_WEATHER,
}
_RANGES = {
    "quantity": (2, 40),
    "price": (50, 950),
    "room": (101, 420),
    "number": (1000, 9999),
    "amount": (200, 9800),
    "degrees": (5, 35),
    "extension": (100, 999),
    "salary": (2000, 6000),
    "platform": (1, 14),
    "数量": (2, 40),
    "总价": (50, 950),
    "房间": (101, 420),
    "分机号": (100, 999),
    "气温": (5, 35),
    "金额": (200, 9800),
    "发票号": (1000, 9999),
    "月薪": (4000, 9000),
}


def fill(rng: Random, template: str) -> tuple[str, Fields]:
    """A template with values in it, and the values."""
    names = [part.partition("}")[0] for part in template.split("{")[1:]]
    values: Fields = {name: _value(rng, name) for name in names}
    return template.format(**values), values


def _value(rng: Random, name: str) -> Any:
    if name in _LISTS:
        return rng.choice(_LISTS[name])
    if name in _RANGES:
        return rng.randint(*_RANGES[name])
    if name == "date":
        return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"
    if name in ("gate", "登机口"):
        return f"{rng.choice('ABCD')}{rng.randint(1, 30)}"
    if name in ("flight", "航班"):
        return f"{rng.choice('KLQT')}{rng.choice('ABSX')}{rng.randint(100, 999)}"
    assert name in ("time", "时间"), name
    return f"{rng.randint(7, 20)}:{rng.choice(('00', '15', '30', '45'))}"


def question(text: str, fields: list[str], *, chinese: bool) -> str:
    """What the model is asked; the example in the suite has the same form."""
    listed = json.dumps(fields, ensure_ascii=False)[1:-1]
    if chinese:
        return f"从文本中提取{listed}，只输出JSON。\n\n文本：{text}"
    return f"Extract {listed} from the text. Answer with JSON only.\n\nText: {text}"


def items(rng: Random) -> list[Fields]:
    """72 English and 40 Chinese items, each of three fields."""
    made = []
    for chinese, templates, number in ((False, ENGLISH, 72), (True, CHINESE, 40)):
        for index in range(number):
            text, values = fill(rng, templates[index % len(templates)])
            names = list(values)
            while len(names) > 3:
                names.remove(rng.choice(names))
            made.append(
                {
                    "id": f"{'zh' if chinese else 'en'}-{index + 1:02}",
                    "prompt": question(text, names, chinese=chinese),
                    "expected": {name: values[name] for name in names},
                }
            )
    return made
