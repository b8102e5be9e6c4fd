"""Names and things that items are filled with. All persons and firms are made up."""

from __future__ import annotations

NAMES = (
    "Anna Berg", "Tom Hill", "Maria Lopez", "John Carter", "Emma Stein", "Peter Novak", "Lucy Gray", "David Kim",
    "Sara Olsen", "Mark Evans", "Julia Weber", "Paul Martin", "Nina Petrov", "Henry Wood", "Clara Jones", "Leo Rossi",
)  # fmt: skip
CITIES = (
    "Oslo", "Lima", "Paris", "Boston", "Madrid", "Berlin", "Dublin", "Cairo", "Vienna", "Toronto", "Athens", "Prague",
    "Lisbon", "Seattle", "Warsaw", "Geneva",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("March", "April", "May", "June", "July", "August", "September", "October")
THINGS = ("lamps", "chairs", "books", "desks", "phones", "shirts", "cups", "bikes", "clocks", "pens", "plates", "bags")
COMPANIES = (
    "Northwind",
    "Bluebird",
    "Acorn Foods",
    "Redstone",
    "Lakeside Bank",
    "Sunfield",
    "Ironbridge",
    "Clearwater",
)
JOBS = ("teacher", "nurse", "baker", "driver", "engineer", "gardener", "painter", "lawyer", "cook", "pilot")
TOPICS = ("budget", "sales", "safety", "design", "hiring", "marketing", "travel", "training")
WEATHER = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")

ZH_NAMES = ("王芳", "李强", "张敏", "刘洋", "陈静", "杨帆", "赵磊", "黄丽", "周涛", "吴娟", "徐明", "孙悦")
ZH_CITIES = ("北京", "上海", "广州", "深圳", "杭州", "成都", "武汉", "西安", "南京", "重庆", "青岛", "大连")
ZH_DAYS = ("星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期日")
ZH_THINGS = ("台灯", "椅子", "书包", "水杯", "闹钟", "毛巾", "雨伞", "键盘")
ZH_COMPANIES = ("蓝天科技", "东湖银行", "绿叶食品", "明月书店", "长风物流", "新桥医院")
ZH_JOBS = ("教师", "护士", "厨师", "司机", "工程师", "园丁", "画家", "律师")
ZH_TOPICS = ("预算", "销售", "安全", "设计", "招聘", "培训")
ZH_WEATHER = ("晴", "多云", "小雨", "大风", "有雾", "小雪")
