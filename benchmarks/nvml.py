"""A GPU's clock and power, from NVIDIA's management library (NVML), which comes with the driver."""

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from threading import Event, Thread
from typing import Any

import torch

from .clock import Reading

LIBRARY = "libnvidia-ml.so.1"
# From nvml.h.
CLOCK_OF_MULTIPROCESSORS, POWER_NOW = 1, 186
PAUSE = 1e-3  # seconds between two readings


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
    """NVML is missing, or does not report a requested value."""


def gauge_of(device: torch.device) -> "Gauge | None":
    """A gauge of the GPU. If the clock cannot be read, warns and returns None. Then nobody notices if two contenders
    have different clocks.
    """
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
        """The power at this moment. If NVML does not report it, this is the result of `nvmlDeviceGetPowerUsage`, which
        on most GPUs is the mean over the last second.
        """
        field, milliwatts = FieldValue(field=POWER_NOW), ctypes.c_uint()
        if not self.call("nvmlDeviceGetFieldValues", self.device, 1, ctypes.byref(field)) and not field.error:
            return field.value / 1e3
        failed = self.call("nvmlDeviceGetPowerUsage", self.device, ctypes.byref(milliwatts))
        return None if failed else milliwatts.value / 1e3

    def read(self) -> Reading | None:
        clock = self.megahertz()
        return None if clock is None else Reading(clock, self.watts())


@contextmanager
def watched(gauge: Gauge | None, start: Any) -> Iterator[list[Reading]]:
    """Reads the gauge from the event `start` on until the context ends. A separate thread reads the gauge, because the
    calling thread launches work in the meantime, or waits for the end of the work.
    """
    found: list[Reading] = []
    if gauge is None:
        yield found
        return
    over = Event()

    def poll() -> None:
        while not over.wait(PAUSE):
            if start.query() and (read := gauge.read()):
                found.append(read)

    thread = Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def middle(found: list[Reading]) -> Reading | None:
    """The medians of the readings; None if there is no reading."""
    watts = [read.watts for read in found if read.watts is not None]
    return Reading(median(read.megahertz for read in found), median(watts) if watts else None) if found else None


def by_place(device: torch.device) -> tuple[str, Any]:
    """The name of NVML's function that finds torch's device, and the argument of this function. NVML and CUDA number
    devices differently. So if torch knows the device's place on the PCI bus, the device is found by this place.
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
