"""Items of the easy code task: functions of a line or two, made of a pattern and a few constants each."""

# ruff: noqa: E501  (one function a line)
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# header with docstring, body, and calls whose results are asserted; {c} is the constant
PATTERNS: tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("add_{c}(n)", "Return n plus {c}.", "return n + {c}", ("2", "5", "10", "100"), ("add_{c}(0)", "add_{c}(7)")),
    ("minus_{c}(n)", "Return n minus {c}.", "return n - {c}", ("1", "3"), ("minus_{c}(0)", "minus_{c}(12)")),
    ("times_{c}(n)", "Return n multiplied by {c}.", "return n * {c}", ("2", "3", "7"), ("times_{c}(5)", "times_{c}(-2)")),
    ("power_{c}(n)", "Return n to the power of {c}.", "return n ** {c}", ("2", "3", "4"), ("power_{c}(3)", "power_{c}(-2)")),
    (
        "divisible_by_{c}(n)",
        "Return True if n is divisible by {c}, else False.",
        "return n % {c} == 0",
        ("2", "3", "5", "10"),
        ("divisible_by_{c}(30)", "divisible_by_{c}(7)"),
    ),
    ("greater_than_{c}(n)", "Return True if n is greater than {c}.", "return n > {c}", ("0", "10"), ("greater_than_{c}({c})", "greater_than_{c}(11)")),
    ("first_{c}(items)", "Return the first {c} elements of the list.", "return items[:{c}]", ("2", "3"), ("first_{c}([4, 5, 6, 7])", "first_{c}([1])")),
    ("last_{c}(items)", "Return the last {c} elements of the list.", "return items[-{c}:]", ("2", "3"), ("last_{c}([4, 5, 6, 7])",)),
    ("count_{c}(text)", "Return how many times the letter {c} is in the text.", "return text.count('{c}')", ("a", "e", "s"), ("count_{c}('seas and tales')", "count_{c}('')")),
    ("starts_with_{c}(text)", "Return True if the text starts with the letter {c}.", "return text.startswith('{c}')", ("a", "b"), ("starts_with_{c}('apple')", "starts_with_{c}('bean')")),
    ("ends_with_{c}(text)", "Return True if the text ends with the letter {c}.", "return text.endswith('{c}')", ("a", "t"), ("ends_with_{c}('data')", "ends_with_{c}('cat')")),
    ("remove_{c}(text)", "Return the text without the letter {c}.", "return text.replace('{c}', '')", ("a", "o"), ("remove_{c}('banana boat')",)),
    ("above_{c}(numbers)", "Return a list of the numbers that are greater than {c}.", "return [n for n in numbers if n > {c}]", ("0", "5"), ("above_{c}([-1, 0, 3, 5, 6, 9])",)),
    ("add_{c}_to_all(numbers)", "Return a list with {c} added to each number.", "return [n + {c} for n in numbers]", ("1", "10"), ("add_{c}_to_all([1, 2, 3])", "add_{c}_to_all([])")),
    ("multiply_all_by_{c}(numbers)", "Return a list with each number multiplied by {c}.", "return [n * {c} for n in numbers]", ("2", "4"), ("multiply_all_by_{c}([1, 2, 3])",)),
    ("repeat_{c}_times(text)", "Return the text repeated {c} times.", "return text * {c}", ("2", "3"), ("repeat_{c}_times('ab')",)),
)  # fmt: skip
SINGLES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("add(a, b)", "Return the sum of a and b.", "return a + b", ("add(2, 3)", "add(-1, 1)")),
    ("subtract(a, b)", "Return a minus b.", "return a - b", ("subtract(5, 3)", "subtract(1, 4)")),
    ("multiply(a, b)", "Return the product of a and b.", "return a * b", ("multiply(3, 4)", "multiply(0, 9)")),
    ("divide(a, b)", "Return a divided by b.", "return a / b", ("divide(9, 3)", "divide(1, 4)")),
    ("remainder(a, b)", "Return the remainder of a divided by b.", "return a % b", ("remainder(9, 4)", "remainder(8, 2)")),
    ("average(numbers)", "Return the average of the numbers.", "return sum(numbers) / len(numbers)", ("average([1, 2, 6])", "average([5])")),
    ("total(numbers)", "Return the sum of the numbers.", "return sum(numbers)", ("total([1, 2, 3])", "total([])")),
    ("largest(numbers)", "Return the largest number.", "return max(numbers)", ("largest([3, 9, 2])", "largest([-5, -2])")),
    ("smallest(numbers)", "Return the smallest number.", "return min(numbers)", ("smallest([3, 9, 2])", "smallest([4])")),
    ("absolute(n)", "Return the absolute value of n.", "return abs(n)", ("absolute(-4)", "absolute(3)")),
    ("is_even(n)", "Return True if n is even.", "return n % 2 == 0", ("is_even(4)", "is_even(7)")),
    ("is_odd(n)", "Return True if n is odd.", "return n % 2 == 1", ("is_odd(4)", "is_odd(7)")),
    ("is_positive(n)", "Return True if n is positive.", "return n > 0", ("is_positive(1)", "is_positive(0)", "is_positive(-3)")),
    ("is_empty(items)", "Return True if the list is empty.", "return len(items) == 0", ("is_empty([])", "is_empty([1])")),
    ("length(items)", "Return the number of elements in the list.", "return len(items)", ("length([1, 2, 3])", "length([])")),
    ("first(items)", "Return the first element of the list.", "return items[0]", ("first([7, 8])", "first(['x'])")),
    ("last(items)", "Return the last element of the list.", "return items[-1]", ("last([7, 8])", "last(['x'])")),
    ("reverse_list(items)", "Return the list in reverse order.", "return items[::-1]", ("reverse_list([1, 2, 3])", "reverse_list([])")),
    ("reverse_text(text)", "Return the text reversed.", "return text[::-1]", ("reverse_text('abc')", "reverse_text('')")),
    ("to_upper(text)", "Return the text in upper case.", "return text.upper()", ("to_upper('abc')", "to_upper('Hi 2')")),
    ("to_lower(text)", "Return the text in lower case.", "return text.lower()", ("to_lower('ABC')", "to_lower('Hi 2')")),
    ("strip_spaces(text)", "Return the text without spaces at its ends.", "return text.strip()", ("strip_spaces('  a b ')",)),
    ("words(text)", "Return the list of words in the text.", "return text.split()", ("words('a bc d')", "words('')")),
    ("count_words(text)", "Return the number of words in the text.", "return len(text.split())", ("count_words('a bc d')", "count_words('')")),
    ("join_words(words)", "Join the words with a space between them.", "return ' '.join(words)", ("join_words(['a', 'b'])", "join_words([])")),
    ("join_with_comma(words)", "Join the words with a comma between them.", "return ','.join(words)", ("join_with_comma(['a', 'b'])",)),
    ("contains(items, value)", "Return True if value is in the list.", "return value in items", ("contains([1, 2], 2)", "contains([], 2)")),
    ("index_of(items, value)", "Return the index of value in the list.", "return items.index(value)", ("index_of([5, 6], 6)",)),
    ("count_value(items, value)", "Return how often value is in the list.", "return items.count(value)", ("count_value([1, 2, 1], 1)", "count_value([], 1)")),
    ("sort_numbers(numbers)", "Return the numbers sorted from smallest to largest.", "return sorted(numbers)", ("sort_numbers([3, 1, 2])",)),
    ("sort_descending(numbers)", "Return the numbers sorted from largest to smallest.", "return sorted(numbers, reverse=True)", ("sort_descending([3, 1, 2])",)),
    ("unique_count(items)", "Return the number of different elements.", "return len(set(items))", ("unique_count([1, 1, 2])", "unique_count([])")),
    ("concatenate(a, b)", "Return the two strings joined together.", "return a + b", ("concatenate('ab', 'c')",)),
    ("hello(name)", "Return 'Hello, ' followed by the name.", "return 'Hello, ' + name", ("hello('Ann')",)),
    ("max_of_two(a, b)", "Return the larger of a and b.", "return max(a, b)", ("max_of_two(2, 3)", "max_of_two(5, 1)")),
    ("max_of_three(a, b, c)", "Return the largest of a, b and c.", "return max(a, b, c)", ("max_of_three(2, 9, 3)", "max_of_three(7, 1, 2)")),
    ("min_of_two(a, b)", "Return the smaller of a and b.", "return min(a, b)", ("min_of_two(2, 3)", "min_of_two(5, 1)")),
    ("both_true(a, b)", "Return True if a and b are both True.", "return a and b", ("both_true(True, False)", "both_true(True, True)")),
    ("negate(value)", "Return the opposite of a bool.", "return not value", ("negate(True)", "negate(False)")),
    ("area_of_rectangle(width, height)", "Return the area of a rectangle.", "return width * height", ("area_of_rectangle(3, 4)",)),
    ("perimeter_of_square(side)", "Return the perimeter of a square.", "return 4 * side", ("perimeter_of_square(5)",)),
    ("celsius_to_fahrenheit(c)", "Convert degrees Celsius to Fahrenheit.", "return c * 9 / 5 + 32", ("celsius_to_fahrenheit(100)", "celsius_to_fahrenheit(0)")),
    ("minutes_to_seconds(minutes)", "Convert minutes to seconds.", "return minutes * 60", ("minutes_to_seconds(3)",)),
    ("hours_to_minutes(hours)", "Convert hours to minutes.", "return hours * 60", ("hours_to_minutes(2)",)),
    ("even_numbers(numbers)", "Return a list of the even numbers.", "return [n for n in numbers if n % 2 == 0]", ("even_numbers([1, 2, 3, 4])",)),
    ("odd_numbers(numbers)", "Return a list of the odd numbers.", "return [n for n in numbers if n % 2 == 1]", ("odd_numbers([1, 2, 3, 4])",)),
    ("squares(numbers)", "Return a list of the squares of the numbers.", "return [n ** 2 for n in numbers]", ("squares([1, 2, 3])",)),
    ("lengths(words)", "Return a list of the lengths of the words.", "return [len(word) for word in words]", ("lengths(['a', 'bcd'])",)),
    ("upper_all(words)", "Return a list of the words in upper case.", "return [word.upper() for word in words]", ("upper_all(['a', 'bc'])",)),
    ("sum_of_squares(numbers)", "Return the sum of the squares of the numbers.", "return sum(n ** 2 for n in numbers)", ("sum_of_squares([1, 2, 3])",)),
    ("factorial(n)", "Return the factorial of n.", "result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result", ("factorial(5)", "factorial(1)")),
    ("fibonacci(n)", "Return the n-th Fibonacci number; fibonacci(1) and fibonacci(2) are 1.", "a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a", ("fibonacci(7)", "fibonacci(1)")),
    ("is_palindrome(text)", "Return True if the text reads the same backwards.", "return text == text[::-1]", ("is_palindrome('abba')", "is_palindrome('ab')")),
    ("count_vowels(text)", "Return the number of vowels in the text.", "return sum(c in 'aeiou' for c in text.lower())", ("count_vowels('education')", "count_vowels('xyz')")),
    ("numbers_up_to(n)", "Return the list of numbers from 1 to n.", "return list(range(1, n + 1))", ("numbers_up_to(4)", "numbers_up_to(0)")),
    ("get_value(data, key)", "Return the value of the key in the dictionary.", "return data[key]", ("get_value({'a': 1}, 'a')",)),
    ("keys_of(data)", "Return the list of keys of the dictionary.", "return list(data.keys())", ("keys_of({'a': 1, 'b': 2})",)),
    ("has_key(data, key)", "Return True if the dictionary has the key.", "return key in data", ("has_key({'a': 1}, 'a')", "has_key({}, 'a')")),
    ("merge(a, b)", "Return the two lists joined into one.", "return a + b", ("merge([1], [2, 3])",)),
    ("second(items)", "Return the second element of the list.", "return items[1]", ("second([7, 8, 9])",)),
    ("without_first(items)", "Return the list without its first element.", "return items[1:]", ("without_first([7, 8, 9])", "without_first([])")),
    ("without_last(items)", "Return the list without its last element.", "return items[:-1]", ("without_last([7, 8, 9])",)),
    ("swap(a, b)", "Return b and a, in this order.", "return b, a", ("swap(1, 2)",)),
    ("double_text(text)", "Return the text twice in a row.", "return text * 2", ("double_text('ab')",)),
    ("first_letter(text)", "Return the first letter of the text.", "return text[0]", ("first_letter('hello')",)),
    ("is_digit(text)", "Return True if the text consists of digits only.", "return text.isdigit()", ("is_digit('123')", "is_digit('12a')")),
    ("to_number(text)", "Convert the text to an integer.", "return int(text)", ("to_number('42')",)),
    ("to_text(n)", "Convert the number to a string.", "return str(n)", ("to_text(42)",)),
)  # fmt: skip


def items() -> list[dict[str, Any]]:
    """Each function once; what its calls have to return is what the solution returns."""
    return [_item(*function) for function in _functions()]


def _functions() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    yield from SINGLES
    for signature, says, body, constants, calls in PATTERNS:
        for c in constants:
            yield (
                signature.format(c=c),
                says.format(c=c),
                body.format(c=c),
                tuple(call.format(c=c) for call in calls),
            )


def _item(signature: str, says: str, body: str, calls: tuple[str, ...]) -> dict[str, Any]:
    header, solution = f'def {signature}:\n    """{says}"""\n', f"    {body}\n"
    scope: dict[str, Any] = {}
    exec(header + solution, scope)
    name = signature.partition("(")[0]
    return {
        "id": name,
        "prompt": "Complete this function.",
        "header": header,
        "entry_point": name,
        "tests": "\n".join(f"assert {call} == {eval(call, scope)!r}" for call in calls),
        "solution": solution,
    }
