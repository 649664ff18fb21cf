"""Published figures of device classes: memory, bandwidth, arithmetic, links between devices.

Rates are dense peaks from the makers' data sheets (NVIDIA: "H100 Tensor Core GPU", "H200", "A100",
"L40S", "L4", "A10", "T4", "B200", "Ada GPU architecture" for the RTX 4090; AMD: "Instinct MI300X"),
in decimal units; memory is the total that the driver's own tool shows. The shares that engines
reach are calibrated with published throughput (`ops/bench/planner_rates.md`). CPUs are not listed:
cores and memory channels differ too much to estimate, so their rates are measured.
"""

import re
from collections.abc import Iterable
from typing import Final

import msgspec

CPU: Final = "cpu"
GB: Final = 10**9
GIB: Final = 1024**3
TERA: Final = 10**12

FLOPS_REACHED: Final = 0.65
A100_FLOPS_REACHED: Final = 0.75
EIGHT_BIT_REACHED: Final = 0.60
"""The shares of the peaks that matrix products of serving engines reach: at 16 bits, at 16 bits on
an A100 (whose peak its power limit does not cut), and at 8 bits."""


class DeviceClass(msgspec.Struct, frozen=True, kw_only=True):
    """One device class. `eight_bit_flops` is 0 if it has no arithmetic below 16 bits.

    `link_bytes_per_s` is what a device sends to others of its node: NVLink, or else PCIe.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float
    flops: float
    eight_bit_flops: float = 0.0
    flops_reached: float = FLOPS_REACHED
    eight_bit_reached: float = EIGHT_BIT_REACHED


def _class(
    name: str,
    memory_mib: int,
    bandwidth_gb_s: float,
    link_gb_s: float,
    tflops: float,
    eight_bit_tflops: float,
) -> DeviceClass:
    return DeviceClass(
        name=name,
        memory_bytes=memory_mib * 1024**2,
        bandwidth_bytes_per_s=bandwidth_gb_s * GB,
        link_bytes_per_s=link_gb_s * GB,
        flops=tflops * TERA,
        eight_bit_flops=eight_bit_tflops * TERA,
        flops_reached=A100_FLOPS_REACHED if name.startswith("a100") else FLOPS_REACHED,
    )


CLASSES: Final = {
    entry.name: entry
    for entry in (
        #      name             MiB   GB/s, link, TFLOPS at 16 and at 8 bits
        _class("b200-180g", 183_359, 8000, 900, 2250, 4500),
        _class("mi300x-192g", 196_592, 5300, 448, 1307, 2615),
        _class("h200-141g", 143_771, 4800, 450, 989, 1979),
        _class("h100-80g", 81_559, 3350, 450, 989, 1979),
        _class("a100-80g", 81_920, 2039, 300, 312, 624),
        _class("a100-40g", 40_960, 1555, 300, 312, 624),
        _class("l40s-48g", 46_068, 864, 32, 362, 733),
        _class("4090-24g", 24_564, 1008, 32, 165, 330),
        _class("a10-24g", 23_028, 600, 32, 125, 250),
        _class("l4-24g", 23_034, 300, 32, 121, 242),
        _class("t4-16g", 15_360, 320, 16, 65, 130),
    )
}


def class_of(name: str) -> DeviceClass | None:
    """Return a class by name, or the nearest in size of the same chip, or None.

    Drivers round memory sizes differently (`h100-79g`), so the chip's name decides, then the size.
    """
    if name in CLASSES:
        return CLASSES[name]
    chip, size_gb = _chip_and_size(name)
    same_chip = [entry for entry in CLASSES.values() if _chip_and_size(entry.name)[0] == chip]
    if not same_chip:
        return None
    return min(
        same_chip, key=lambda entry: (abs(_chip_and_size(entry.name)[1] - size_gb), entry.name)
    )


def _chip_and_size(name: str) -> tuple[str, int]:
    matched = re.fullmatch(r"([a-z0-9]+?)(?:-[a-z0-9-]*?)?-(\d+)g", name)
    return (matched[1], int(matched[2])) if matched else (name, 0)


def is_named_by(device_class: str, names: Iterable[str]) -> bool:
    """Return whether one of `names` is a device class or its chip: `h100-80g`, or any `H100`.

    An H100 of 80 GB reports its memory as `h100-86g`, and is named by its class here, too.
    """
    reported = device_class.lower()
    chip, size_gb = _chip_and_size(reported)
    listed = class_of(reported)
    is_of_size = listed is not None and size_gb == round(listed.memory_bytes / GB)
    own = {reported, chip} | ({listed.name} if listed is not None and is_of_size else set())
    return bool(own.intersection(name.lower() for name in names))
