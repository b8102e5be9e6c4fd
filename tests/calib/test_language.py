"""The kind of a text, on what people send."""

from __future__ import annotations

import pytest

from harness.calib.language import kind_of_text


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("How long can I keep white tea?", "Latin"),
        ("Wie lange hält sich weißer Tee? Größe XL", "Latin"),
        ("这款白茶放了三年还能喝吗", "Chinese"),
        ("请看一下 README 里的说明再回答这个问题，谢谢", "Chinese"),
        ("このお茶は三年間保存できますか", "Japanese"),
        ("이 차를 삼 년 동안 보관할 수 있나요", "Korean"),
        ("Сколько стоит доставка?", "Cyrillic"),
        ("كم سعر الشحن", "Arabic"),
        ("please translate 请把这句话翻译成中文谢谢 the second sentence as well", "Chinese+Latin"),
        ("1234 5678 ... !!", "other"),
        ("", "other"),
        ("def f(x):\n    y = x + 1\n    return y\n", "code"),
        ('{\n  "a": 1,\n  "b": [2, 3]\n}', "code"),
        ("int main() {\n  // 打印\n  printf(\"x\");\n  return 0;\n}", "code"),
        ("First I went home.\nThen I slept.\nThe next day it rained.", "Latin"),
        ("- buy milk\n- call mother\n- water the plants", "Latin"),
    ],
)  # fmt: skip
def test_kinds(text: str, kind: str) -> None:
    assert kind_of_text(text) == kind


def test_a_text_of_megabytes_is_judged_by_its_ends() -> None:
    assert kind_of_text("好" * 3000 + "a" * 3_000_000 + "好" * 3000) == "Chinese"
