"""What a device's link to the host carries at most, as the kernel tells it in /sys."""

from __future__ import annotations

from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")

_LINE_CODE = ((5.0, 8 / 10), (32.0, 128 / 130), (64.0, 242 / 256))
"""Up to so many GT/s of a lane, the part of the bits that is data (PCI Express Base
Specification: 8b/10b, 128b/130b, flits)."""
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


def link(bus_id: str, devices: Path = DEVICES) -> tuple[float, str, str] | None:
    """Bytes a second in one direction, what the link is, and the file that says so.

    None where the kernel does not know, as in many virtual machines. The speed is the highest of
    the device, as a link sleeps at a lower one; the width is that in use. Packets' headers are not
    taken off.
    """
    folder = devices / bus_id.lower()
    try:
        speed = float((folder / "max_link_speed").read_text().split()[0])
        lanes = int((folder / "current_link_width").read_text())
    except (OSError, ValueError, IndexError):
        return None
    part = next((part for most, part in _LINE_CODE if speed <= most), 0.0)
    if speed not in _GENERATIONS or not 0 < lanes <= 32 or not part:
        return None
    what = f"PCIe {_GENERATIONS[speed]}.0 x{lanes}"
    return speed * 1e9 * part * lanes / 8, what, f"{folder}/max_link_speed"
