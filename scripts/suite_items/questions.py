"""Items of the question answering task: a short passage whose facts are made up, and a question about one of them."""

from __future__ import annotations

from random import Random
from typing import Any

from words import CITIES, COMPANIES, DAYS, JOBS, NAMES, ZH_CITIES, ZH_COMPANIES, ZH_DAYS, ZH_JOBS, ZH_NAMES

_LISTS: dict[str, tuple[str, ...]] = {
    "name": NAMES,
    "city": CITIES,
    "other": CITIES,
    "company": COMPANIES,
    "day": DAYS,
    "job": JOBS,
    "subject": ("history", "music", "biology", "chemistry", "law", "medicine", "physics", "art"),
    "hobby": ("swimming", "chess", "painting", "cooking", "cycling", "gardening", "photography", "dancing"),
    "shown": ("old maps", "toys", "clocks", "stamps", "masks", "coins", "ships", "shoes"),
    "place": ("Harbour", "Hilltop", "Riverside", "Oldtown", "Parkway", "Mill Street"),
    "animal": ("grey marten", "ring-tailed fox", "blue heron", "marsh deer", "stone frog", "sand lizard"),
    "habitat": ("forests", "swamps", "deserts", "mountains", "caves", "river valleys"),
    "food": ("insects", "berries", "fish", "leaves", "seeds", "snails"),
    "active": ("at night", "at dawn", "in the evening", "at noon"),
    "river": ("Tarn", "Selva", "Morra", "Kestrel", "Alder", "Brenna"),
    "lake": ("Lake Orin", "Lake Palla", "the North Sea", "the Black Sea", "Lake Vera"),
    "product": ("radio", "lamp", "watch", "camera", "speaker", "drill"),
    "color": ("black", "green", "silver", "yellow", "purple", "orange"),
    "姓名": ZH_NAMES,
    "城市": ZH_CITIES,
    "公司": ZH_COMPANIES,
    "星期": ZH_DAYS,
    "职业": ZH_JOBS,
    "专业": ("历史", "音乐", "生物", "化学", "法律", "医学", "物理", "美术"),
    "爱好": ("游泳", "下棋", "画画", "做饭", "骑车", "种花", "摄影", "跳舞"),
    "展品": ("古地图", "玩具", "钟表", "邮票", "面具", "钱币"),
    "颜色": ("黑色", "绿色", "银色", "黄色", "紫色", "橙色"),
    "产品": ("收音机", "台灯", "手表", "相机", "音箱"),
}
_RANGES = {
    "year": (1905, 1998),
    "price": (3, 25),
    "weight": (2, 60),
    "length": (80, 900),
    "hours": (4, 30),
    "grams": (90, 900),
    "floor": (2, 9),
    "年份": (1905, 1998),
    "票价": (10, 90),
    "小时": (4, 30),
    "克": (90, 900),
}

# a passage, and questions with the field that answers each
ENGLISH: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "{name} was born in {city} and studied {subject}. After school {name} became a {job} and now works for "
        "{company}. Every {day} there is time for {hobby}.",
        (
            ("Where was {name} born?", "city"),
            ("What did {name} study?", "subject"),
            ("Which company does {name} work for?", "company"),
            ("On which day is there time for {hobby}?", "day"),
        ),
    ),
    (
        "The {place} Museum in {city} opened in {year}. It shows {shown}. A ticket costs {price} euros, and the museum "
        "is closed on {day}.",
        (
            ("When did the museum open?", "year"),
            ("What does the museum show?", "shown"),
            ("On which day is the museum closed?", "day"),
            ("In which city is the museum?", "city"),
        ),
    ),
    (
        "The {animal} lives in {habitat}. It eats {food} and weighs about {weight} kilograms. It is most active "
        "{active}.",
        (
            ("Where does the {animal} live?", "habitat"),
            ("What does the {animal} eat?", "food"),
            ("How many kilograms does it weigh?", "weight"),
        ),
    ),
    (
        "The river {river} is {length} kilometres long. It begins near {city} and flows into {lake}. The largest town "
        "on its banks is {other}.",
        (
            ("How many kilometres long is the river?", "length"),
            ("What does the river flow into?", "lake"),
            ("Near which city does the river begin?", "city"),
        ),
    ),
    (
        "The new {product} by {company} comes in {color}. Its battery lasts {hours} hours, and it weighs {grams} "
        "grams. It was first shown in {city}.",
        (
            ("Which colour does the {product} come in?", "color"),
            ("How many hours does the battery last?", "hours"),
            ("Where was it first shown?", "city"),
            ("Which company makes the {product}?", "company"),
        ),
    ),
    (
        "The office of {company} moved to {city} in {year}. The director is {name}, who has a room on floor {floor}. "
        "Visitors are welcome on {day}.",
        (
            ("Who is the director?", "name"),
            ("Where did the office move to?", "city"),
            ("When are visitors welcome?", "day"),
        ),
    ),
)
CHINESE: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "{姓名}出生在{城市}，大学学的是{专业}，毕业后成为一名{职业}，在{公司}工作。业余爱好是{爱好}。",
        (
            ("{姓名}出生在哪里？", "城市"),
            ("{姓名}大学学的是什么？", "专业"),
            ("{姓名}的爱好是什么？", "爱好"),
            ("{姓名}在哪家公司工作？", "公司"),
        ),
    ),
    (
        "这家博物馆位于{城市}，{年份}年开馆，主要展出{展品}。门票{票价}元，每逢{星期}闭馆。",
        (
            ("博物馆展出什么？", "展品"),
            ("博物馆哪一年开馆？", "年份"),
            ("博物馆每逢星期几闭馆？", "星期"),
        ),
    ),
    (
        "{公司}推出了一款新的{产品}，颜色是{颜色}，电池可用{小时}小时，重{克}克，首先在{城市}上市。",
        (
            ("新{产品}是什么颜色？", "颜色"),
            ("电池可用多少小时？", "小时"),
            ("首先在哪里上市？", "城市"),
        ),
    ),
)


def items(rng: Random) -> list[dict[str, Any]]:
    """72 English and 40 Chinese items."""
    made = []
    for language, passages, number in (("en", ENGLISH, 72), ("zh", CHINESE, 40)):
        for index in range(number):
            passage, asked = passages[index % len(passages)]
            question, field = asked[index // len(passages) % len(asked)]
            values = _values(rng, passage)
            text, wanted = passage.format(**values), question.format(**values)
            asks, start = ("问题：", "答案：") if language == "zh" else ("Question: ", "Answer:")
            made.append(
                {
                    "id": f"{language}-{index + 1:02}",
                    "prompt": f"{text}\n\n{asks}{wanted}",
                    "answer_prefix": start,
                    "answers": [str(values[field])],
                }
            )
    return made


def _values(rng: Random, passage: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in dict.fromkeys(part.partition("}")[0] for part in passage.split("{")[1:]):
        # no value twice in a passage, or the question would not tell which is meant
        left = [value for value in _LISTS.get(name, ()) if value not in values.values()]
        values[name] = rng.choice(left) if left else rng.randint(*_RANGES[name])
    return values
