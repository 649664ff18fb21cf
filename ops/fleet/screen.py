"""The live table of the fleet, and the instructions for using it."""

import asyncio
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from isochrone.cli.client import AdminError
from ops.fleet import layout, model
from ops.fleet.bring_up import LocalFleet
from ops.fleet.cities import CITIES


def how_to_use(fleet: LocalFleet) -> str:
    """Return the addresses, the key, and commands that can be copied."""
    endpoints = "\n".join(f"  {city.pop}  {layout.endpoint(city)}/v1" for city in CITIES)
    url = layout.endpoint(CITIES[-1])
    return f"""\
admin API   {layout.admin_url()}   (token in {fleet.state}/admin.token)
endpoints
{endpoints}
key         {fleet.key}

In another terminal, in this folder:

curl {url}/v1/chat/completions -H 'Authorization: Bearer {fleet.key}' \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model.NAME}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

.venv/bin/python - <<'EOF'
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{fleet.key}")
for chunk in client.chat.completions.create(model="{model.NAME}", stream=True,
                                            messages=[{{"role": "user", "content": "Hello!"}}]):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
EOF

export ISOCHRONE_ADMIN_URL={layout.admin_url()}
export ISOCHRONE_ADMIN_TOKEN=$(cat {fleet.state}/admin.token)
.venv/bin/isochrone explain {model.DEPLOYMENT}
"""


async def watch(fleet: LocalFleet, console: Console, stopping: asyncio.Event) -> str:
    """Show the fleet until `stopping` is set or a process exits; return that process, or ""."""
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while not stopping.is_set():
            ended = fleet.processes.ended()
            if ended:
                return ended[0]
            try:
                live.update(await _fleet_table(fleet))
            except AdminError as error:
                live.update(Text(str(error), style="yellow"))
            try:
                async with asyncio.timeout(1.0):
                    await stopping.wait()
            except TimeoutError:
                continue
    return ""


async def _fleet_table(fleet: LocalFleet) -> Group:
    status = await fleet.ask("GET", "/v1/status")
    nodes = (await fleet.ask("GET", "/v1/nodes"))["data"]
    placements = await fleet.placements()
    explanation: dict[str, Any] = await fleet.ask(
        "GET", f"/v1/deployments/{model.DEPLOYMENT}/explain"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("POP", "NODE", "LAST SEEN", "REPLICA", "STATE", "REQUESTS", "REASON"):
        table.add_column(column)
    demand = {city["pop"]: city["requests_per_s"] for city in explanation["cities"]}
    for node in nodes:
        here = [row for row in placements if row["node_id"] == node["node_id"]]
        silent = node["silent_s"]
        table.add_row(
            node["pop"],
            node["node_id"],
            "never" if silent is None else f"{silent:.0f} s ago",
            "\n".join(row["replica_id"] for row in here) or "-",
            "\n".join("draining" if r["ending"] else r["state"] for r in here) or "-",
            f"{demand.get(node['pop'], 0.0):.2f}/s",
            "\n".join(row["reason"] for row in here) or "-",
        )
    summary = (
        f"generation {status['generation']}  epoch {status['epoch']}  "
        f"routes {status['route_generation']}  {status['frozen']}  Ctrl-C stops everything"
    )
    return Group(table, Text(summary, style="dim"))
