"""Reads the project's Markdown documents."""

import re


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
