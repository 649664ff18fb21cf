"""The simulated planet: cities, fleet, models and demand, drawn from public data and a seed.

- Cities: the 335 sites of a large CDN (cloudflare-colo-list, MIT) with the largest population
  nearest to them (GeoNames, CC-BY-4.0), with their time zones.
- Fleet: the first 190 of these have GPUs. The first 40 have 4 to 7 nodes of 8 h100-80g (half of
  these PoPs h200-141g), the next 70 have 2 to 4 nodes of 8 (h100-80g, a100-80g or l40s-48g), the
  rest 1 to 3 nodes of 4 (l40s-48g or l4-24g).
- Models: 100, of 1 to 1,000 GB, log-uniform. Smaller ones tend to be more popular (rank correlation
  about 0.75). Popularity is Zipf with exponent 1, times a lognormal (0.6) per region and model.
- Demand: requests/s by population and by the hour-of-day profile of ServeGen's m-small (Apache-2.0)
  in local time, five sixths of it at weekends, with autocorrelated noise of 5 %.
"""

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import numpy as np

from isochrone.wire.ids import DeploymentId, ModelId, PopId
from isochrone.wire.models.model import CatalogModel, Deployment, EngineSettings, PlacementPolicy
from isochrone.wire.peers.report import ReplicaProfile
from isochrone.wire.peers.routes import Pop
from ops.sim.data import folder_argument, rows
from ops.sim.small_worlds import a_model, a_node, devices_for, speed_profile
from scheduler.decide.arrays import Floats
from scheduler.decide.capacity.device_classes import CLASSES, GIB
from scheduler.decide.cluster import DemandRate, FleetNode, MeasuredProfile

CITIES: Final = 335
GPU_CITIES: Final = 190
MODELS: Final = 100
REQUESTS_PER_S: Final = 8_000.0
"""Mean requests/s of the whole planet."""

PROMPT_TOKENS: Final = 700.0
OUTPUT_TOKENS: Final = 250.0
"""Mean uncached prompt tokens and output tokens of a request (azure2023_conv: 1,155 with cached
ones, and 211; mooncake: 343 output tokens)."""

REQUESTS_PER_S_MIN: Final = 0.001
SPEED: Final = {
    "h200-141g": 1.3,
    "h100-80g": 1.0,
    "a100-80g": 0.55,
    "l40s-48g": 0.3,
    "l4-24g": 0.1,
}
START: Final = datetime(2026, 6, 1, tzinfo=UTC)


class PlanetWorld(NamedTuple):
    """The fixed parts of the planet; `requests` gives the demand of any minute."""

    pops: tuple[Pop, ...]
    people: Floats
    offset_h: Floats
    regions: list[str]
    nodes: tuple[FleetNode, ...]
    models: tuple[CatalogModel, ...]
    deployments: tuple[Deployment, ...]
    profiles: tuple[MeasuredProfile, ...]
    share: Floats
    profile: Floats
    noise: Floats
    rates: dict[tuple[int, str], ReplicaProfile]

    def requests(self, minute: int) -> Floats:
        """Return requests/s by city and deployment in a minute since Monday 00:00 UTC."""
        local = (minute / 60 + self.offset_h) % 168
        hour = local % 24
        before = np.floor(hour).astype(int)
        part = hour - before
        level = self.profile[before] * (1 - part) + self.profile[(before + 1) % 24] * part
        level = np.where(local >= 120, level * 5 / 6, level)
        level = level * self.people * self.noise[minute % len(self.noise)]
        return np.asarray(REQUESTS_PER_S * level[:, None] * self.share, dtype=np.float64)


def world_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that select a planet: public data and a seed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=folder_argument, default="", help="folder of public data")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def draw(data: Path, seed: int = 1, models_count: int = MODELS) -> PlanetWorld:
    """Return the planet of a seed."""
    rng = np.random.default_rng(seed)
    pops, people, zones, regions = _cities(data)
    nodes = tuple(
        node for rank, pop in enumerate(pops[:GPU_CITIES]) for node in _nodes(rng, rank, pop)
    )
    models, deployments, profiles = _catalogue(rng, models_count)
    share = _share(rng, regions, len(deployments))
    shape = json.loads((data / "servegen" / "stats.json").read_text())["m-small"]["hour_profile"]
    hours = np.array(shape, dtype=np.float64)
    return PlanetWorld(
        pops=pops,
        people=people / people.sum(),
        offset_h=np.array([_offset_h(zone) for zone in zones]),
        regions=regions,
        nodes=nodes,
        models=models,
        deployments=deployments,
        profiles=profiles,
        share=share,
        profile=hours / hours.mean(),
        noise=_noise(rng, len(pops)),
        rates={
            (number, row.device_class): row.profile
            for number, model in enumerate(models)
            for row in profiles
            if row.model_id == model.model_id
        },
    )


def demand_rows(world: PlanetWorld, requests: Floats) -> tuple[DemandRate, ...]:
    """Return demand rows of a cluster state from requests/s by city and deployment."""
    cities, deployments = np.nonzero(requests >= REQUESTS_PER_S_MIN)
    names = [deployment.deployment_id for deployment in world.deployments]
    pops = [pop.pop for pop in world.pops]
    values = requests[cities, deployments]
    return tuple(
        DemandRate(
            deployment_id=names[number],
            pop=pops[city],
            requests_per_s=value,
            uncached_tokens_per_s=value * PROMPT_TOKENS,
            output_tokens_per_s=value * OUTPUT_TOKENS,
        )
        for city, number, value in zip(
            cities.tolist(), deployments.tolist(), values.tolist(), strict=True
        )
    )


def _cities(data: Path) -> tuple[tuple[Pop, ...], Floats, list[str], list[str]]:
    """Return the sites with population, time zone and region, the largest population first."""
    airports = {row["iata"]: row for row in rows(data / "cities" / "airports_iata.csv.gz")}
    sites: list[dict[str, str]] = []
    for row in rows(data / "cities" / "cloudflare_colos.csv"):
        if not row["lat"] and row["colo"] in airports:
            row |= {"lat": airports[row["colo"]]["lat"], "lon": airports[row["colo"]]["lon"]}
        if row["lat"]:
            sites.append(row)
    lat = np.array([float(row["lat"]) for row in sites])
    lon = np.array([float(row["lon"]) for row in sites])
    people = np.zeros(len(sites))
    largest: dict[int, tuple[float, str]] = {}
    for row in rows(data / "cities" / "geonames_cities15000.csv.gz"):
        near = _nearest(lat, lon, float(row["latitude"]), float(row["longitude"]))
        population = float(row["population"])
        people[near] += population
        largest[near] = max(largest.get(near, (0.0, "UTC")), (population, row["timezone"]))
    order = [int(i) for i in np.argsort(-people, kind="stable")[:CITIES]]
    pops = tuple(
        Pop(
            pop=PopId(sites[i]["colo"].lower()),
            city=sites[i]["city"],
            country=sites[i]["cca2"],
            latitude=float(lat[i]),
            longitude=float(lon[i]),
        )
        for i in order
    )
    zones = [largest.get(i, (0.0, "UTC"))[1] for i in order]
    return pops, people[order], zones, [sites[i]["region"] for i in order]


def _nearest(lat: Floats, lon: Floats, to_lat: float, to_lon: float) -> int:
    half_lat = np.sin(np.radians(lat - to_lat) / 2) ** 2
    half_lon = np.sin(np.radians(lon - to_lon) / 2) ** 2
    near = half_lat + np.cos(np.radians(lat)) * np.cos(np.radians(to_lat)) * half_lon
    return int(near.argmin())


def _offset_h(zone: str) -> float:
    offset = START.astimezone(ZoneInfo(zone)).utcoffset()
    return offset.total_seconds() / 3600 if offset else 0.0


def _nodes(rng: np.random.Generator, rank: int, pop: Pop) -> list[FleetNode]:
    if rank < 40:
        kind = str(rng.choice(["h100-80g", "h200-141g"], p=[0.5, 0.5]))
        count, devices = int(rng.integers(4, 8)), 8
    elif rank < 110:
        kind = str(rng.choice(["h100-80g", "a100-80g", "l40s-48g"]))
        count, devices = int(rng.integers(2, 5)), 8
    else:
        kind = str(rng.choice(["l40s-48g", "l4-24g"]))
        count, devices = int(rng.integers(1, 4)), 4
    nodes = (a_node(pop, number, kind, devices) for number in range(count))
    return [msgspec.structs.replace(node, disk_free_bytes=20 * 10**12) for node in nodes]


def _catalogue(
    rng: np.random.Generator, count: int
) -> tuple[tuple[CatalogModel, ...], tuple[Deployment, ...], tuple[MeasuredProfile, ...]]:
    """Draw models; the first is the most popular."""
    sizes = np.exp(rng.uniform(0.0, np.log(1000.0), count))
    sizes[:2] = 1.0, 1000.0
    ranks = np.argsort(np.argsort(sizes))
    order = np.argsort(ranks + rng.normal(0.0, 0.25 * count, count))
    models, deployments, profiles = [], [], []
    for number, place in enumerate(order):
        weights_gb = round(float(sizes[place]), 1)
        model = a_model(f"model-{number:03d}", weights_gb)
        kv = int(GIB * min(12.0, 3.0 + weights_gb / 30))
        devices = devices_for(model, kv, int(CLASSES["h100-80g"].memory_bytes * 0.95))
        if devices > 8:
            devices = 8  # the largest fit eight h200-141g only
        models.append(model)
        deployments.append(
            Deployment(
                deployment_id=DeploymentId(f"d{number:03d}"),
                name=f"d{number:03d}",
                model_id=ModelId(model.model_id),
                engine=EngineSettings(driver="vllm", kv_memory_bytes=kv, devices=devices),
                policy=_policy(rng, number, weights_gb),
            )
        )
        profiles += [
            MeasuredProfile(
                model_id=model.model_id,
                device_class=kind,
                profile=speed_profile(weights_gb, devices, 4.0 * speed),
            )
            for kind, speed in SPEED.items()
        ]
    return tuple(models), tuple(deployments), tuple(profiles)


def _policy(rng: np.random.Generator, number: int, weights_gb: float) -> PlacementPolicy:
    """A tenth stay in Europe (unless large), a tenth out of two countries; priorities vary."""
    europe = ("DE", "FR", "NL", "GB", "ES", "IT", "PL", "SE", "IE", "BE", "CH", "AT", "PT")
    return PlacementPolicy(
        replicas_min=int(rng.choice([0, 1, 2])),
        replicas_max=2000,
        allow=europe if number % 10 == 7 and weights_gb < 200 else (),
        deny=("RU", "CN") if number % 10 == 3 else (),
        priority=int(rng.choice([40, 50, 50, 50, 60])),
    )


def _share(rng: np.random.Generator, regions: Sequence[str], count: int) -> Floats:
    """Return the share of each city's requests that each deployment gets."""
    zipf = 1.0 / np.arange(1, count + 1)
    names = sorted(set(regions))
    preference = {name: zipf * rng.lognormal(0.0, 0.6, count) for name in names}
    share = np.array([preference[region] / preference[region].sum() for region in regions])
    return np.asarray(share, dtype=np.float64)


def _noise(rng: np.random.Generator, cities: int) -> Floats:
    minutes = 7 * 24 * 60
    level = np.zeros((minutes, cities))
    shocks = rng.normal(0.0, 0.05 * np.sqrt(1 - 0.95**2), (minutes, cities))
    level[0] = rng.normal(0.0, 0.05, cities)
    for minute in range(1, minutes):
        level[minute] = 0.95 * level[minute - 1] + shocks[minute]
    return np.asarray(np.exp(level), dtype=np.float64)
