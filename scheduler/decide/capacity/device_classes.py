"""Published figures of device classes: memory, bandwidth, arithmetic.

Rates are dense peaks from the makers' data sheets (NVIDIA: "H100 Tensor Core GPU", "H200", "A100",
"L40S", "L4", "A10", "T4", "B200"; AMD: "Instinct MI300X"), in decimal units; memory is the total
that the driver's own tool shows. The share that engines reach is in `replica_capacity.py`. CPUs are
not listed: cores and memory channels differ too much to estimate, so their rates are measured.
"""

import re
from typing import Final

import msgspec

CPU: Final = "cpu"
GB: Final = 10**9
GIB: Final = 1024**3
TERA: Final = 10**12


class DeviceClass(msgspec.Struct, frozen=True, kw_only=True):
    """One device class. `eight_bit_flops` is 0 if it has no arithmetic below 16 bits."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops: float
    eight_bit_flops: float = 0.0


def _class(
    name: str,
    memory_mib: int,
    bandwidth_gb_s: float,
    tflops: float,
    eight_bit_tflops: float,
) -> DeviceClass:
    return DeviceClass(
        name=name,
        memory_bytes=memory_mib * 1024**2,
        bandwidth_bytes_per_s=bandwidth_gb_s * GB,
        flops=tflops * TERA,
        eight_bit_flops=eight_bit_tflops * TERA,
    )


CLASSES: Final = {
    entry.name: entry
    for entry in (
        #      name             MiB   GB/s   TFLOPS at 16 and at 8 bits
        _class("b200-180g", 183_359, 8000, 2250, 4500),
        _class("mi300x-192g", 196_592, 5300, 1307, 2615),
        _class("h200-141g", 143_771, 4800, 989, 1979),
        _class("h100-80g", 81_559, 3350, 989, 1979),
        _class("a100-80g", 81_920, 2039, 312, 624),
        _class("a100-40g", 40_960, 1555, 312, 624),
        _class("l40s-48g", 46_068, 864, 362, 733),
        _class("a10-24g", 23_028, 600, 125, 250),
        _class("l4-24g", 23_034, 300, 121, 242),
        _class("t4-16g", 15_360, 320, 65, 130),
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
