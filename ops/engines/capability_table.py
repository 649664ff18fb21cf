"""Writes the table of engines' capabilities into docs/engine.md.

python -m ops.engines.capability_table
"""

from pathlib import Path
from typing import Final

from isochrone.wire.engines.engine_capabilities import (
    ENGINE_CAPABILITIES,
    FEATURES,
    MIB,
    EngineCapabilities,
)
from isochrone.wire.http.headers import INEXACT, SEEDED

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "engine.md"
BEGIN: Final = "<!-- made by ops/engines/capability_table.py -->"
END: Final = "<!-- end -->"


def with_table(text: str) -> str:
    """Return a document with the current table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{capability_table()}\n{END}{after}"


def capability_table() -> str:
    """Return the capabilities of all engines as a Markdown table."""
    rows = [("", *ENGINE_CAPABILITIES)]
    engines = ENGINE_CAPABILITIES.values()
    for feature, words in FEATURES.items():
        rows.append((words, *("yes" if feature in one.features else "no" for one in engines)))
    resumed = {SEEDED: "greedy and seeded exactly", INEXACT: "with another text", "": "no"}
    salts = {"": "none", "body": "`cache_salt`", "chat_body": "`cache_salt`, chat only"}
    salts["uncached"] = "none, no prompt is cached"
    rows += [
        ("over several nodes", *(_yes(one.over_nodes) for one in engines)),
        ("adapters (LoRA)", *(_condition(one.adapters) for one in engines)),
        ("sleep of idle replicas", *(_sleep(one) for one in engines)),
        ("phases apart", *(one.handshake or "no" for one in engines)),
        ("changes its role without a restart", *(_change(one) for one in engines)),
        ("how KV is sent", *(_transfer(one) for one in engines)),
        ("shares KV in a PoP", *(_sharing(one) for one in engines)),
        ("KV events", *(_yes(one.kv_events) for one in engines)),
        ("resumes a cut answer", *(resumed[one.resumes] for one in engines)),
        ("says how many tokens an event has", *(_yes(one.counts_tokens) for one in engines)),
        ("statistics move during an answer", *(_yes(one.counts_steps) for one in engines)),
        ("prompts cached in units of", *(_tokens(one.cache_block_tokens) for one in engines)),
        ("cache salt of a tenant", *(salts.get(one.salt, one.salt) for one in engines)),
        ("orders its queue by priority", *(_yes(one.priority) for one in engines)),
        ("preempts for a higher priority", *(_yes(one.preempts) for one in engines)),
        ("always calls a tool that is named", *(_yes(one.forces_named_tools) for one in engines)),
        ("refuses other models' names", *(_yes(one.checks_model_name) for one in engines)),
        ("refuses fields it does not know", *(_yes(one.refuses_unknown_fields) for one in engines)),
        ("refuses sampling out of range", *(_yes(one.checks_sampling) for one in engines)),
        ("type of the KV cache", *(_names(one.kv_type_options) for one in engines)),
        ("memory set by", *(_names(one.memory_options) for one in engines)),
        ("memory beside weights, KV and activations", *(_memory(one) for one in engines)),
        ("limit of sequences", *(_names((one.sequences_option,)) for one in engines)),
        ("tokens of a step", *(_names((one.step_tokens_option,)) for one in engines)),
        ("files of weights", *(", ".join(one.weights) or "any" for one in engines)),
        ("versions", *(one.versions for one in engines)),
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _yes(is_able: bool) -> str:
    return "yes" if is_able else "no"


def _condition(when: str) -> str:
    return {"": "no", "always": "yes", "with_option": "with an option"}[when]


def _sleep(one: EngineCapabilities) -> str:
    where = "" if one.sleeps_on_cpu or not one.sleep else ", on GPUs"
    return _condition(one.sleep) + where


def _change(one: EngineCapabilities) -> str:
    return _yes(not one.fixed_roles) if one.sends_kv else "has none"


def _transfer(one: EngineCapabilities) -> str:
    if not one.sends_kv:
        return "not sent"
    if not one.transfer_option:
        return "nodes' API"
    choices = ", ".join(one.transfer_choices)
    return f"`{one.transfer_option}`: {choices}; {one.transfer_default} by default"


def _sharing(one: EngineCapabilities) -> str:
    if not one.shares_kv:
        return "no"
    if one.kv_store_by_option:
        return f"nodes' API; with `kv_store_bytes` also {one.kv_store}"
    return one.kv_store or "nodes' API"


def _tokens(count: int) -> str:
    return f"{count} tokens" if count else "not cached"


def _names(options: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in options if name) or "none"


def _memory(one: EngineCapabilities) -> str:
    graphs = f" + {one.graph_bytes // MIB} for graphs" if one.graph_bytes else ""
    return f"{one.overhead_bytes // MIB} MiB{graphs}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
