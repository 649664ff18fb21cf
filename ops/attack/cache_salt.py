"""Bodies with another tenant's cache salt: how many reach an engine that reads JSON leniently?

`python -m ops.attack.cache_salt` prints how many of 300 bodies an engine would serve from the
victim's prefix cache.
"""

import argparse
import json
from collections.abc import Iterator

from isochrone.wire.errors import ApiError
from nodeagent.drivers.request_body import with_fields

VICTIM = "victim"
OWN_SALT = "attacker"


def bodies() -> Iterator[bytes]:
    """Yield 300 bodies that one parser may read and another may not."""
    chat = '"model": "m", "messages": [{"role": "user", "content": "hi"}], "cache_salt": "victim"'
    for number in range(100):
        yield f'{{{chat}, "\\ud8{number:02}": 1}}'.encode()
        depth = 900 + number
        yield f'{{{chat}, "x": {"[" * depth}{"]" * depth}}}'.encode()
        encoding = ("utf-16", "utf-32", "utf-8-sig", "utf-16-le")[number % 4]
        yield f'{{{chat}, "n": {number}}}'.encode(encoding)


def main() -> None:
    """Print how many bodies carry the victim's salt after the node has salted them."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    sent = reached = stolen = 0
    for body in bodies():
        sent += 1
        try:
            forwarded = with_fields(body, {"cache_salt": OWN_SALT})
        except ApiError:
            continue
        reached += 1
        try:
            stolen += json.loads(forwarded).get("cache_salt") == VICTIM
        except (ValueError, RecursionError):
            continue
    print(f"{stolen} of {sent} bodies read the victim's cache; {reached} reached the engine")


if __name__ == "__main__":
    main()
