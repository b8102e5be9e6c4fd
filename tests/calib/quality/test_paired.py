import numpy as np
import pytest

from harness.calib.quality.paired import bootstrap_mean, bootstrap_tokens, detectable_difference


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    intervals = [bootstrap_mean(rng.normal(0.3, 1.0, 100)) for _ in range(200)]
    covered = np.mean([i.low <= 0.3 <= i.high for i in intervals])
    assert 0.88 < covered < 0.99


def test_tokens_that_are_alike_give_a_wider_interval_than_if_each_stood_for_itself() -> None:
    stretches = np.repeat(np.random.default_rng(2).normal(0.0, 1.0, 64), 32)
    alone, together = bootstrap_mean(stretches), bootstrap_tokens(stretches)
    assert together.high - together.low > 4 * (alone.high - alone.low)
    assert together.value == pytest.approx(stretches.mean())


@pytest.mark.parametrize("num", [1, 2, 31, 33, 100])
def test_an_interval_contains_its_value(num: int) -> None:
    values = np.random.default_rng(num).normal(size=num)
    for interval in (bootstrap_mean(values), bootstrap_tokens(values)):
        assert interval.low <= interval.value <= interval.high
        assert interval.value == pytest.approx(values.mean())


def test_the_same_differences_give_the_same_interval() -> None:
    values = np.random.default_rng(3).normal(size=50)
    assert bootstrap_mean(values) == bootstrap_mean(values.copy())


def test_a_drop_of_the_detectable_size_is_found_four_times_in_five() -> None:
    rng = np.random.default_rng(4)
    found = []
    for _ in range(300):
        differences = rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.8, 0.1], size=200)
        size = detectable_difference(differences)
        dropped = differences - size
        found.append(bootstrap_mean(dropped).high < 0)
    assert 0.7 < np.mean(found) < 0.9


def test_items_that_all_agree_do_not_promise_to_detect_everything() -> None:
    assert detectable_difference(np.zeros(100)) == pytest.approx(0.028, abs=0.001)
