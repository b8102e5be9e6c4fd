"""Sets drawn from small logs, with tokenizers of bytes and templates of each temper."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.build.open_source import open_source
from harness.calib.calibration_set import CalibrationSet, make_calibration_set
from harness.calib.traffic import read_text
from harness.errors import CalibrationError
from harness.tokenizer import Tokenizer, TokenizerFiles

PLAIN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
IGNORES_SYSTEM = "{{ bos_token }}{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
REFUSES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
DATED = "{{ strftime_now('%H:%M:%S.%f') }}" + PLAIN
PROMPT = "You are the agent of a shop for tea. Be brief."

Make = Callable[..., TokenizerFiles]


@pytest.fixture
def tokenizer(make_tokenizer: Make) -> Tokenizer:
    return Tokenizer(make_tokenizer(chat_template=PLAIN), {})


def prose(rng: random.Random, num_words: int = 12) -> str:
    return " ".join("".join(rng.choices("aeiounrstlkmd", k=rng.randint(2, 8))) for _ in range(num_words))


def chat(user: str, system: str | None = PROMPT, answer: str | None = None) -> dict[str, Any]:
    turns = [("system", system), ("user", user), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in turns if text is not None]}


def chats(num: int, *, seed: int = 0, system: str | None = PROMPT) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [chat(prose(rng), system) for _ in range(num)]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def texts(tokenizer: Tokenizer, ids: tuple[np.ndarray, ...]) -> list[str]:
    return [tokenizer.decode(sample.tolist()) for sample in ids]


def assert_sound(made: CalibrationSet, max_tokens: int) -> None:
    every = [ids.tobytes() for ids in (*made.samples, *made.held_out)]
    assert len(set(every)) == len(every)
    assert all(ids.dtype == np.int64 and ids.ndim == 1 and 0 < len(ids) <= max_tokens for ids in made.samples)
    assert made.num_tokens == sum(map(len, made.samples))
    assert (made.report.num_samples, made.report.num_held_out) == (len(made.samples), len(made.held_out))


def test_a_log_becomes_rendered_samples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", chats(200))
    made = make_calibration_set(tokenizer, traffic=[path], num_samples=130, max_tokens=256)
    assert_sound(made, 256)
    assert (len(made.samples), len(made.held_out), made.label) == (130, 32, "log.jsonl")
    assert all(text.startswith(f"[system]{PROMPT}[user]") for text in texts(tokenizer, made.samples))
    assert all(ids[0] == tokenizer.bos_token_id != ids[1] for ids in made.samples)
    assert made.system_prompt_share == 1.0
    assert made.report.warnings == ()


def test_the_order_of_lines_and_files_does_not_matter(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = chats(90) + chats(30, seed=1, system="Another prompt.") + chats(9, seed=2, system=None)
    whole = write(tmp_path / "a", lines)
    made = make_calibration_set(tokenizer, traffic=[whole], num_samples=40)
    random.Random(3).shuffle(lines)
    parts = [write(tmp_path / "b", lines[:50]), write(tmp_path / "c", lines[50:])]
    again = make_calibration_set(tokenizer, traffic=parts, num_samples=40)
    assert again.fingerprint == made.fingerprint
    assert make_calibration_set(tokenizer, traffic=[whole], num_samples=40, seed=1).samples[0].tolist() != (
        made.samples[0].tolist()
    )


@pytest.mark.parametrize(
    "change", [{"num_samples": 41}, {"max_tokens": 100}, {"seed": 5}, {"allow_no_system_prompts": True}]
)
def test_the_fingerprint_follows_the_options(tokenizer: Tokenizer, tmp_path: Path, change: dict[str, Any]) -> None:
    path = write(tmp_path / "a", chats(60))
    options: dict[str, Any] = {"traffic": [path], "num_samples": 40, "max_tokens": 128}
    assert (
        make_calibration_set(tokenizer, **options | change).fingerprint
        != make_calibration_set(tokenizer, **options).fingerprint
    )


def test_the_fingerprint_follows_samples_and_tokenizer(
    make_tokenizer: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    lines = chats(12)
    path = write(tmp_path / "a", lines)
    made = make_calibration_set(tokenizer, traffic=[path])
    others = [
        Tokenizer(make_tokenizer(chat_template=PLAIN, plain=("tea",)), {}),
        Tokenizer(make_tokenizer(chat_template=PLAIN + " "), {}),
    ]
    fingerprints = {made.fingerprint, *(make_calibration_set(t, traffic=[path]).fingerprint for t in others)}
    lines[5]["messages"][1]["content"] += "!?"
    fingerprints.add(make_calibration_set(tokenizer, traffic=[write(path, lines)]).fingerprint)
    assert len(fingerprints) == 4


def test_rare_kinds_are_drawn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rng = random.Random(4)
    lines = chats(1000)
    lines.append(chat("请问这款白茶放了三年还能喝吗，一直放在柜子里没有打开过"))
    lines.append(chat("Сколько стоит доставка чая в другой город?"))
    lines.append(chat(prose(rng), system="A prompt that one request in a thousand has."))
    lines.append(chat(prose(rng, 900)))
    made = make_calibration_set(tokenizer, traffic=[write(tmp_path / "a", lines)], num_samples=128, max_tokens=300)
    together = "".join(texts(tokenizer, made.samples))
    assert "白茶" in together
    assert "Сколько" in together
    assert "one request in a thousand" in together
    assert made.report.num_truncated >= 1
    shares = {share.name: share for share in made.report.languages}
    assert shares["Chinese"].of_set > shares["Chinese"].of_traffic > 0
    assert sum(share.of_set for share in made.report.languages) == pytest.approx(1)


def test_shares_of_common_kinds_follow_the_traffic(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = chats(300) + chats(100, seed=1, system="Another prompt, less common.")
    made = make_calibration_set(tokenizer, traffic=[write(tmp_path / "a", lines)], num_samples=128)
    first, second = made.report.system_prompts
    assert (first.of_traffic, second.of_traffic) == (0.75, 0.25)
    assert first.of_set == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("system", [None, "", " \n\t"])
def test_no_system_prompt_stops(tokenizer: Tokenizer, tmp_path: Path, system: str | None) -> None:
    path = write(tmp_path / "a", chats(20, system=system))
    with pytest.raises(CalibrationError, match=r"(?s)has a system prompt.*--system-prompt FILE.*--no-system-prompts"):
        make_calibration_set(tokenizer, traffic=[path])
    made = make_calibration_set(tokenizer, traffic=[path], allow_no_system_prompts=True)
    assert made.system_prompt_share == 0.0


def test_given_prompts_go_in_turn_to_requests_without_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = []
    for name, text in (("one", "Prompt one."), ("two", "\ufeffPrompt two.\r\nSecond line.\n\n")):
        files.append(tmp_path / name)
        files[-1].write_bytes(text.encode())
    lines = chats(20, system=None) + chats(20, seed=1, system="") + chats(10, seed=2, system="Its own.")
    lines += [{"prompt": prose(random.Random(9))}, {"prompt": "Prompt one.\n" + prose(random.Random(8))}]
    path = write(tmp_path / "a", lines)
    made = make_calibration_set(tokenizer, traffic=[path], system_prompts=files)
    found = texts(tokenizer, (*made.samples, *made.held_out))
    assert made.system_prompt_share == 1.0
    assert made.report.num_prompts_added == 41
    assert sum("[system]Its own." in text for text in found) == 10
    given = [sum(prompt in text for text in found) for prompt in ("Prompt one.", "Prompt two.\nSecond line.")]
    assert given == [22, 20]
    assert not any("[system][user]" in text or text.count("Prompt one.") > 1 for text in found)
    assert make_calibration_set(tokenizer, traffic=[path], system_prompts=files[::-1]).fingerprint == made.fingerprint


def test_prompts_are_decoded_as_traffic_is(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A file that a shell of Windows wrote is the same prompt as one in UTF-8."""
    prompts, traffic = [], write(tmp_path / "a", chats(12, system=None))
    for number, encoding in enumerate(("utf-8", "utf-8-sig", "utf-16", "utf-16-be")):
        path = tmp_path / f"prompt-{number}.txt"
        mark = "\ufeff" * (encoding == "utf-16-be")
        path.write_bytes(f"{mark}Größe 大小\r\nbriefly\r\n".encode(encoding))
        made = make_calibration_set(tokenizer, traffic=[traffic], system_prompts=[path])
        prompts.append(made.fingerprint)
    assert len(set(prompts)) == 1
    (tmp_path / "latin").write_bytes("Größe".encode("latin-1"))
    assert read_text(tmp_path / "latin") == "Gr\ufffd\ufffde"


def test_a_blank_or_missing_prompt_file_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    blank = tmp_path / "blank"
    blank.write_text(" \n")
    for path in (blank, tmp_path / "missing"):
        with pytest.raises(CalibrationError, match="--system-prompt"):
            make_calibration_set(tokenizer, system_prompts=[path])


@pytest.mark.parametrize("template", [IGNORES_SYSTEM, REFUSES])
def test_where_system_turns_are_dropped_or_refused_the_user_turn_gets_them(
    make_tokenizer: Make, tmp_path: Path, template: str
) -> None:
    tokenizer = Tokenizer(make_tokenizer(chat_template=template), {})
    path = write(tmp_path / "a", chats(6, system=None) + chats(6, seed=1, system="Its own."))
    file = tmp_path / "prompt"
    file.write_text(PROMPT)
    made = make_calibration_set(tokenizer, traffic=[path], system_prompts=[file])
    found = texts(tokenizer, (*made.samples, *made.held_out))
    assert sum(text.startswith(f"[user]{PROMPT}\n\n") for text in found) == 6
    assert sum(text.startswith("[user]Its own.\n\n") for text in found) == 6
    assert made.system_prompt_share == 1.0
    bundled = make_calibration_set(tokenizer, max_tokens=64)
    assert all(share.of_traffic == 0 for share in bundled.report.system_prompts if share.name == "(none)")


def test_instructions_in_the_user_turn_count(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [chat(f"{PROMPT}\n\n{line['messages'][0]['content']}", None) for line in chats(20, system=None)]
    path = write(tmp_path / "a", lines + chats(5, seed=1, system=None))
    with pytest.raises(CalibrationError):
        make_calibration_set(tokenizer, traffic=[path])
    file = tmp_path / "prompt"
    file.write_text(PROMPT + "\n")
    made = make_calibration_set(tokenizer, traffic=[path], system_prompts=[file])
    found = texts(tokenizer, (*made.samples, *made.held_out))
    assert made.report.num_prompts_added == 5
    # the five others get it where the traffic has it, not in a system turn
    assert all(text.startswith(f"[user]{PROMPT}\n\n") and text.count(PROMPT) == 1 for text in found)


def test_turns_that_a_template_refuses_are_put_in_a_form_it_takes(make_tokenizer: Make, tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_tokenizer(chat_template=REFUSES), {})
    roles = ("user", "user", "assistant", "tool", "user")
    messages = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]
    path = write(tmp_path / "a", [{"messages": messages}, {"messages": messages[2:]}])
    made = make_calibration_set(tokenizer, traffic=[path], allow_no_system_prompts=True)
    assert texts(tokenizer, made.samples) == ["[user]user 0\n\nuser 1[assistant]assistant 2[user]tool 3\n\nuser 4"]
    assert made.report.num_refused == 1
    with pytest.raises(CalibrationError, match="accepts none of the 1 requests"):
        make_calibration_set(tokenizer, traffic=[write(path, [{"messages": messages[2:]}])])


def test_a_model_without_a_template_gets_plain_text(make_tokenizer: Make, tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_tokenizer(), {})
    made = make_calibration_set(tokenizer, traffic=[write(tmp_path / "a", [chat("hello there", "Be kind.")])])
    assert texts(tokenizer, made.samples) == ["Be kind.\n\nhello there"]
    assert not made.report.has_chat_template
    assert made.system_prompt_share == 1.0


def test_a_template_that_writes_the_time_gives_one_set(make_tokenizer: Make, tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_tokenizer(chat_template=DATED), {})
    path = write(tmp_path / "a", chats(9))
    first, second = (make_calibration_set(tokenizer, traffic=[path]) for _ in range(2))
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("num", "num_samples", "num_held_out"),
    [(1, 1, 0), (5, 5, 0), (8, 4, 4), (100, 90, 10), (140, 126, 14), (200, 128, 32)],
)
def test_sizes_of_small_pools(
    tokenizer: Tokenizer, tmp_path: Path, num: int, num_samples: int, num_held_out: int
) -> None:
    made = make_calibration_set(tokenizer, traffic=[write(tmp_path / "a", chats(num))])
    assert_sound(made, 512)
    assert (len(made.samples), len(made.held_out)) == (num_samples, num_held_out)
    warnings = " ".join(made.report.warnings)
    assert ("below 128" in warnings) == (num_samples < 128)
    assert ("nothing is held out" in warnings) == (num_held_out == 0)


def test_more_than_512_samples_warn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a", chats(600))
    made = make_calibration_set(tokenizer, traffic=[path], num_samples=540, max_tokens=64)
    assert len(made.samples) == 540
    assert "above 512" in made.report.warnings[0]


def test_duplicates_and_near_duplicates_are_dropped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = prose(random.Random(5), 300)
    lines = chats(10) * 3
    lines += [chat(f"{long} at {i}:00"[: len(long) + 9]) for i in range(5)]  # a retry with another time
    lines += [chat(long.upper() + "!!"), chat(long, system="Under another prompt it is another request.")]
    made = make_calibration_set(tokenizer, traffic=[write(tmp_path / "a", lines)])
    assert_sound(made, 512)
    assert (made.report.num_requests, made.report.num_duplicates) == (37, 20)
    assert (made.report.num_distinct, made.report.num_near_duplicates) == (12, 5)


def test_short_questions_under_a_long_shared_prompt_are_no_duplicates(tokenizer: Tokenizer, tmp_path: Path) -> None:
    system = "Rules: " + prose(random.Random(6), 300)
    made = make_calibration_set(tokenizer, traffic=[write(tmp_path / "a", chats(40, system=system))], max_tokens=128)
    assert_sound(made, 128)
    assert made.report.num_distinct == len(made.samples) + len(made.held_out) == 40
    found = texts(tokenizer, made.samples)
    # windows of 127 bytes show all of the prompt, the others what the users said and some of the prompt's end
    shared = f"[system]{system}"
    fronts = [shared.index(text) for text in found if text in shared]
    assert {at for start in fronts for at in range(start, start + 127)} == set(range(len(shared)))
    assert len(fronts) == len(made.samples) / 2
    assert sum("[user]" in text for text in found) == len(made.samples) / 2
    assert all(ids[0] == tokenizer.bos_token_id for ids in (*made.samples, *made.held_out))
    assert made.report.num_truncated == 40
    assert made.report.lengths.p50 > 128


def test_a_short_system_prompt_is_in_front_of_every_long_request(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rng = random.Random(7)
    lines = [chat("START " + prose(rng, 200) + " END") for _ in range(40)]
    made = make_calibration_set(tokenizer, traffic=[write(tmp_path / "a", lines)], max_tokens=200)
    for text in texts(tokenizer, (*made.samples, *made.held_out)):
        assert text.startswith(f"[system]{PROMPT}[user]START ")
        assert text.endswith(" END")
    assert made.system_prompt_share == 1.0


def test_the_share_with_a_system_prompt_is_that_of_the_windows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rng = random.Random(8)
    system = prose(rng, 100)
    path = write(tmp_path / "a", [chat(prose(rng, 100).upper(), system) for _ in range(200)])
    made = make_calibration_set(tokenizer, traffic=[path], max_tokens=128)
    hold = [text for text in texts(tokenizer, made.samples) if "[user]" in text or not text.isupper()]
    assert made.system_prompt_share == len(hold) / 128 == 0.25
    shares = {share.name[:20]: (share.of_traffic, share.of_set) for share in made.report.system_prompts}
    assert shares == {system[:20]: (1.0, 0.25), "(none)": (0.0, 0.75)}


def test_a_system_prompt_that_no_window_holds_stops(make_tokenizer: Make, tmp_path: Path) -> None:
    # what this template writes first fills the window
    tokenizer = Tokenizer(make_tokenizer(chat_template="rules " * 50 + PLAIN), {})
    path = write(tmp_path / "a", [chat(line["messages"][1]["content"] * 5) for line in chats(1)])
    with pytest.raises(CalibrationError, match="has a system prompt"):
        make_calibration_set(tokenizer, traffic=[path], max_tokens=64)
    assert make_calibration_set(tokenizer, traffic=[path], max_tokens=1024).system_prompt_share == 1.0


def test_secrets_never_become_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = chats(20)
    for i, line in enumerate(lines):
        line["messages"][1]["content"] += f" mail u{i}@corp.example.com, 电话1381234{i:04d}, password=hunter{i:03d}x"
    lines.append(chat("x " * 4000 + "ip 10.9.8.7"))
    made = make_calibration_set(tokenizer, traffic=[write(tmp_path / "a", lines)])
    together = "".join(texts(tokenizer, (*made.samples, *made.held_out)))
    for secret in ("corp.example", "1381234", "hunter", "10.9.8.7"):
        assert secret not in together
    # what is counted is what the samples hold
    assert made.report.redactions == {k: together.count(f"<{k}>") for k in ("EMAIL", "IP", "PASSWORD", "PHONE")}
    assert made.report.redactions == {"EMAIL": 20, "IP": 1, "PASSWORD": 20, "PHONE": 20}


def test_requests_that_differ_in_a_secret_alone_are_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [chat(f"Mail the invoice to {name}@corp.example.com please") for name in ("anna", "bob", "carlos", "dora")]
    made = make_calibration_set(tokenizer, traffic=[write(tmp_path / "a", lines * 3 + chats(10))])
    assert_sound(made, 512)
    assert len(made.samples) + len(made.held_out) == 11


def test_dirty_input_reaches_the_samples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, [*chats(3), chat("teh  pirce?? 多少钱 \x00 \U0001f600")])
    with path.open("ab") as file:
        file.write(
            b'{"messages": [{"role": "system", "content": "S"}, '
            b'{"role": "user", "content": "\xd6\xd0\xce\xc4 broken"}]}'
        )
        file.write(b"\nnot json\n")
    made = make_calibration_set(tokenizer, traffic=[path])
    together = "".join(texts(tokenizer, made.samples))
    assert "teh  pirce?? 多少钱 \x00 \U0001f600" in together
    assert "\ufffd broken" in together
    assert made.report.num_bad_lines == 1
    assert made.report.num_broken_encodings == 1


def test_the_bundled_set_needs_no_traffic(tokenizer: Tokenizer, tmp_path: Path) -> None:
    made = make_calibration_set(tokenizer, max_tokens=256)
    assert_sound(made, 256)
    assert made.label == made.report.label == "bundled default set"
    assert (len(made.samples), len(made.held_out), made.report.warnings) == (128, 32, ())
    file = tmp_path / "prompt"
    file.write_text(PROMPT)
    # production's own prompt takes the place of the bundled ones
    given = make_calibration_set(tokenizer, system_prompts=[file], max_tokens=64)
    assert [share.name[:46] for share in given.report.system_prompts if share.of_traffic] == [PROMPT]
    none = make_calibration_set(tokenizer, allow_no_system_prompts=True, max_tokens=64)
    assert none.system_prompt_share == 0.0


def test_the_bundled_set_fills_windows_of_a_real_tokenizer(smollm2_path: Path) -> None:
    source = open_source(str(smollm2_path))
    made = make_calibration_set(Tokenizer(source.tokenizer, source.generation_config))
    assert_sound(made, 512)
    assert (len(made.samples), len(made.held_out), made.system_prompt_share) == (128, 32, 1.0)
    assert made.num_tokens > 0.75 * 128 * 512
    assert {"Latin", "Chinese", "code"} <= {share.name for share in made.report.languages}
    assert made.report.num_refused == made.report.num_bad_lines == 0


@pytest.mark.parametrize("options", [{"num_samples": 0}, {"max_tokens": 8}])
def test_sizes_that_make_no_set_are_refused(tokenizer: Tokenizer, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="samples of"):
        make_calibration_set(tokenizer, **options)  # type: ignore[arg-type]
