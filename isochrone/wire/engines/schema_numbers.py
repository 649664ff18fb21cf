"""Numbers in a client's JSON schema that end an engine.

llguidance 1.9.1, which compiles grammars in the embedded engine and in others, negates a number of
-2**63 or less as an integer of 64 bits without end, and the overflow of the stack ends the process.
"""

import re
from typing import Any, Final

NUMBER_MIN: Final = 1024 - 2**63
"""Below it a number that becomes a 64-bit float is -2**63 or less."""

_LOW_IN_TEXT: Final = re.compile(r"-\d{19}|-\d[\d.]*[eE]\+?\d{2}")
"""A number in a schema or grammar that is written as text, if it may be so low."""


def has_low_number(value: Any, *, in_texts: bool = False) -> bool:
    """Return whether there is a number below NUMBER_MIN anywhere in a decoded JSON value.

    With `in_texts`, texts are schemas or grammars, whose numbers count, too.
    """
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            left.extend(found.values())
        elif isinstance(found, list):
            left.extend(found)
        elif isinstance(found, str):
            if in_texts and _LOW_IN_TEXT.search(found):
                return True
        elif isinstance(found, int | float) and found < NUMBER_MIN:
            return True
    return False
