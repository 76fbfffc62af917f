"""What may be said about where and how clients run. None of it changes more than rounding."""

import dataclasses

import jax

from fedpa.errors import check_integer, refuse

MatmulPrecision = str
"""default, high or highest."""


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How an engine uses the machine; what is not set, the engine chooses."""

    device: str | None = None
    """Kind of device to run on: cpu, gpu or tpu; JAX's default if not given."""
    devices: int | None = None
    """How many devices to use (sharded); all if not given."""
    clients_in_flight: int | None = None
    """Clients that run side by side in one program, on each device."""
    workers: int | None = None
    """Programs that run at a time, each in a thread of its own."""
    matmul_precision: MatmulPrecision = "default"
    """Precision of matrix products on accelerators: default, high or highest."""


def check_options(options: EngineOptions) -> None:
    """Refuse what this machine does not have."""
    for name in ("devices", "clients_in_flight", "workers"):
        value = getattr(options, name)
        if value is not None:
            check_integer(name, value, 1)
    if options.matmul_precision not in ("default", "high", "highest"):
        raise refuse(
            "matmul_precision", options.matmul_precision, "must be default, high or highest"
        )
    available = devices_of(options)
    if options.devices is not None and options.devices > len(available):
        hint = ""
        if available[0].platform == "cpu":
            hint = (
                " (XLA_FLAGS=--xla_force_host_platform_device_count="
                f"{options.devices} divides a CPU)"
            )
        raise refuse("devices", options.devices, f"there are {len(available)}{hint}")


def devices_of(options: EngineOptions) -> list[jax.Device]:
    """All devices of the kind asked for."""
    try:
        return jax.devices(options.device)
    except RuntimeError:
        found = sorted({device.platform for device in jax.devices()})
        raise refuse(
            "device", options.device, f"there is none here; there is {', '.join(found)}"
        ) from None


def chosen_devices(options: EngineOptions) -> list[jax.Device]:
    """The devices to use, after `check_options`."""
    return devices_of(options)[: options.devices]
