"""Reads whole numbers from texts that anyone may have written: headers, queries, options."""


def parse_digits(text: str, digits_max: int = 9) -> int | None:
    """Return the number of a text of at most `digits_max` ASCII digits; None for any other text.

    int() also takes signs, spaces, underscores and the digits of all scripts, and raises an error
    for thousands of digits.
    """
    is_number = text.isascii() and text.isdigit() and len(text) <= digits_max
    return int(text) if is_number else None
