"""A GPU's clock and power, from NVIDIA's management library (NVML), which comes with the driver."""

import ctypes
import os
import warnings
from statistics import median
from time import sleep
from typing import Any

import torch

from .clock import Reading

LIBRARY = "libnvidia-ml.so.1"
# From nvml.h.
CLOCK_OF_MULTIPROCESSORS, POWER_NOW = 1, 186
PAUSE = 5e-4  # seconds between two readings


class FieldValue(ctypes.Structure):
    """`nvmlFieldValue_t`."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_int),
        ("error", ctypes.c_int),
        ("value", ctypes.c_uint),
        ("rest_of_the_value", ctypes.c_uint),
    )


class Unreadable(Exception):
    """NVML is missing, or does not say what is asked."""


def gauge_of(device: torch.device) -> "Gauge | None":
    """None, and a warning, where the clock cannot be read. Then contenders may run at different clocks unnoticed."""
    try:
        return Gauge(device)
    except (OSError, Unreadable) as problem:
        warnings.warn(f"the GPU's clock and power are not logged: {problem}", stacklevel=2)
        return None


class Gauge:
    def __init__(self, device: torch.device) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        self.need("nvmlInit_v2")
        self.device = ctypes.c_void_p()
        self.need(*by_place(device), ctypes.byref(self.device))
        self.clock = ctypes.c_uint()
        self.need("nvmlDeviceGetClockInfo", self.device, CLOCK_OF_MULTIPROCESSORS, ctypes.byref(self.clock))

    def call(self, name: str, *arguments: Any) -> int:
        """NVML's error code; 0 is success."""
        return getattr(self.library, name)(*arguments)

    def need(self, name: str, *arguments: Any) -> None:
        if code := self.call(name, *arguments):
            raise Unreadable(f"{name} fails with error {code}")

    def megahertz(self) -> float | None:
        failed = self.call("nvmlDeviceGetClockInfo", self.device, CLOCK_OF_MULTIPROCESSORS, ctypes.byref(self.clock))
        return None if failed else float(self.clock.value)

    def watts(self) -> float | None:
        """Of this moment. Where NVML lacks that, `nvmlDeviceGetPowerUsage`, a mean of the last second on most GPUs."""
        field, milliwatts = FieldValue(field=POWER_NOW), ctypes.c_uint()
        if not self.call("nvmlDeviceGetFieldValues", self.device, 1, ctypes.byref(field)) and not field.error:
            return field.value / 1e3
        failed = self.call("nvmlDeviceGetPowerUsage", self.device, ctypes.byref(milliwatts))
        return None if failed else milliwatts.value / 1e3

    def between(self, start: Any, end: Any) -> Reading | None:
        """The medians of the readings between two events of the GPU; at least one reading, however soon the end is."""
        while not start.query():
            sleep(PAUSE / 10)
        clocks, powers = [self.megahertz()], [self.watts()]
        while not end.query():
            sleep(PAUSE)
            clocks.append(self.megahertz())
            powers.append(self.watts())
        told, drawn = ([value for value in values if value is not None] for values in (clocks, powers))
        return Reading(median(told), median(drawn) if drawn else None) if told else None


def by_place(device: torch.device) -> tuple[str, Any]:
    """NVML's function that finds torch's device, and its argument. NVML numbers devices otherwise than CUDA, so the
    place on the PCI bus is asked where torch knows it.
    """
    facts = torch.cuda.get_device_properties(device)
    if hasattr(facts, "pci_bus_id"):
        place = f"{facts.pci_domain_id:08x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        return "nvmlDeviceGetHandleByPciBusId_v2", place.encode()
    index = device.index or 0
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = visible[index] if visible[index:] and visible[index] else str(index)
    if name.isdecimal():
        return "nvmlDeviceGetHandleByIndex_v2", int(name)
    return "nvmlDeviceGetHandleByUUID", name.encode()
