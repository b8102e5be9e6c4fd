"""Items of the multiple choice task: what most people know, as the end of a sentence. Written for this project."""

from __future__ import annotations

from random import Random
from typing import Any

# a sentence to go on with, the right end, and wrong ones
ENGLISH = """
The opposite of hot is | cold | loud | green
The opposite of up is | down | near | full
The opposite of big is | small | fast | blue
The opposite of day is | night | lunch | week
The opposite of empty is | full | short | late
The opposite of early is | late | soft | deep
The opposite of hard is | soft | tall | dry
The capital of France is | Paris | Rome | Berlin
The capital of Japan is | Tokyo | Beijing | Bangkok
The capital of Italy is | Rome | Madrid | Vienna
The capital of Spain is | Madrid | Lisbon | Dublin
The capital of England is | London | Oslo | Athens
The capital of Germany is | Berlin | Prague | Brussels
The capital of Egypt is | Cairo | Nairobi | Tunis
The capital of Russia is | Moscow | Warsaw | Helsinki
The sun rises in the | east | west | kitchen
Water freezes and turns into | ice | steam | sand
When water boils it turns into | steam | ice | stone
Bees make | honey | milk | wool
Cows give us | milk | honey | silk
Sheep give us | wool | eggs | honey
Hens lay | eggs | bricks | apples
A baby dog is called a | puppy | kitten | calf
A baby cat is called a | kitten | puppy | lamb
A baby cow is called a | calf | chick | cub
A spider has eight | legs | wings | tails
A bicycle has two | wheels | engines | roofs
A triangle has three | sides | circles | wheels
One week has seven | days | months | years
One year has twelve | months | days | hours
One minute has sixty | seconds | hours | days
The month after January is | February | June | December
The month after April is | May | March | October
The day after Monday is | Tuesday | Friday | Sunday
The day before Sunday is | Saturday | Wednesday | Monday
The color of grass is | green | purple | orange
The color of snow is | white | black | red
The color of a ripe banana is | yellow | blue | grey
The color of blood is | red | green | white
We see with our | eyes | ears | feet
We hear with our | ears | eyes | hands
We smell with our | nose | knee | elbow
Fish live in | water | trees | the sand
Birds can fly because they have | wings | fins | wheels
Plants make food from sunlight in a process called | photosynthesis | digestion | gravity
The Earth moves around the | Sun | Moon | Mars
The Moon moves around the | Earth | Sun | stars
The planet nearest to the Sun is | Mercury | Saturn | Neptune
The largest planet of the solar system is | Jupiter | Mars | Venus
The largest ocean on Earth is the | Pacific | Atlantic | Arctic
The highest mountain on Earth is Mount | Everest | Fuji | Kenya
The force that pulls things to the ground is called | gravity | friction | magnetism
The gas that we need to breathe is | oxygen | helium | neon
The hardest natural material is | diamond | chalk | wood
A person who flies a plane is called a | pilot | sailor | baker
A person who bakes bread is called a | baker | lawyer | driver
A person who teaches in a school is called a | teacher | farmer | sailor
A person who writes books is called an | author | actor | engineer
A doctor works in a | hospital | bakery | cinema
Books can be borrowed from a | library | restaurant | bakery
You cut paper with | scissors | a spoon | a pillow
You eat soup with a | spoon | hammer | pencil
You open a lock with a | key | cup | shoe
You write on paper with a | pen | fork | sock
You tell the time with a | clock | spoon | chair
When it rains, people use an | umbrella | oven | engine
In winter people wear warm | coats | swimsuits | sandals
Romeo and Juliet was written by William | Shakespeare | Einstein | Mozart
The theory of relativity was found by Albert | Einstein | Shakespeare | Picasso
The first man on the Moon was Neil | Armstrong | Newton | Columbus
The first president of the United States was George | Washington | Lincoln | Kennedy
The language most people speak in Brazil is | Portuguese | German | Japanese
The language most people speak in Mexico is | Spanish | French | Chinese
The currency of Japan is the | yen | euro | dollar
Two plus two equals | four | seven | one
Three times three equals | nine | five | two
Ten minus five equals | five | eight | three
Half of ten is | five | nine | two
The first letter of the alphabet is | A | M | Z
The last letter of the alphabet is | Z | B | K
The plural of mouse is | mice | mouses | moose
The past tense of go is | went | gone to | goes
"""
CHINESE = """
中国的首都是 | 北京 | 东京 | 巴黎
日本的首都是 | 东京 | 首尔 | 罗马
法国的首都是 | 巴黎 | 伦敦 | 北京
“大”的反义词是 | 小 | 红 | 书
“上”的反义词是 | 下 | 花 | 水
“黑”的反义词是 | 白 | 高 | 远
“冷”的反义词是 | 热 | 短 | 新
“左”的反义词是 | 右 | 长 | 早
一年有十二个 | 月 | 天 | 小时
一个星期有七 | 天 | 年 | 月
一分钟有六十 | 秒 | 天 | 年
太阳从东方 | 升起 | 落下 | 结冰
水结成了 | 冰 | 火 | 沙子
雪的颜色是 | 白色 | 黑色 | 红色
草的颜色是 | 绿色 | 紫色 | 黑色
天空的颜色是 | 蓝色 | 棕色 | 黑白
我们用眼睛 | 看 | 听 | 闻
我们用耳朵 | 听 | 看 | 吃
鱼生活在 | 水里 | 树上 | 云里
医生在哪里工作？在 | 医院 | 厨房 | 沙漠
教学生的人叫 | 老师 | 司机 | 厨师
开车的人叫 | 司机 | 画家 | 医生
下雨的时候要带 | 雨伞 | 钢琴 | 石头
喝汤要用 | 勺子 | 铅笔 | 鞋子
地球绕着什么转？绕着 | 太阳 | 月亮 | 火星
世界上最高的山峰是 | 珠穆朗玛峰 | 泰山 | 富士山
中国最长的河是 | 长江 | 尼罗河 | 多瑙河
《西游记》里会七十二变的是 | 孙悟空 | 林黛玉 | 诸葛亮
李白是著名的 | 诗人 | 将军 | 医生
二加二等于 | 四 | 七 | 一
"""


def items(rng: Random) -> list[dict[str, Any]]:
    """One item a line, the right end at a place drawn."""
    made = []
    for language, lines in (("en", ENGLISH), ("zh", CHINESE)):
        for number, line in enumerate(lines.split("\n")[1:-1], 1):
            stem, *ends = line.split(" | ")
            space = " " if language == "en" else ""
            choices = [space + end for end in ends]
            right = choices[0]
            rng.shuffle(choices)
            made.append(
                {
                    "id": f"{language}-{number:02}",
                    "prompt": f"Finish the sentence: {stem}" if language == "en" else f"把句子写完：{stem}",
                    "answer_prefix": stem,
                    "choices": choices,
                    "correct": choices.index(right),
                }
            )
    return made
