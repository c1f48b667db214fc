"""Occupancy of a kernel from what a trace says of it, by the rules of NVIDIA's cuda_occupancy.h.

Needed because of the "est. achieved occupancy %" in the trace: Kineto asks NVIDIA's calculator with
the default limit of shared memory, so a kernel that opted in to more than 48 KiB in a block reads
0 %; and it rounds to a whole percentage. Both figures are kept here.

A block takes warps, registers (256 at a time for each warp) and shared memory (its own and 1 KiB of
the driver, in units of 128 bytes); the blocks that fit on a multiprocessor (SM) are the least of
the four limits. Clusters of blocks can lower it further: a trace does not tell of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from attn_ext.profile.event import Event

_WARP = 32
_REGISTER_UNIT = 256
_PARTITIONS = 4
_MAX_REGISTERS = 256
_NO_LIMIT = 2**31 - 1
# Blocks on an SM by compute capability. A capability that is not here is not known.
_MAX_BLOCKS = {
    (7, 0): 32, (7, 2): 32, (7, 5): 16, (8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24,
    (9, 0): 32, (10, 0): 32, (10, 1): 24, (10, 3): 32, (11, 0): 24, (12, 0): 24, (12, 1): 24,
}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A GPU as "deviceProperties" of a trace describes it. Sizes in bytes."""

    name: str
    capability: tuple[int, int]
    sms: int
    threads_per_block: int
    threads_per_sm: int
    registers_per_block: int
    registers_per_sm: int
    shared_per_block: int
    shared_per_block_optin: int
    shared_per_sm: int

    @classmethod
    def parse(cls, properties: Any) -> Device | None:
        """From an entry of deviceProperties; None where it lacks something."""
        try:
            return cls(
                name=str(properties["name"]),
                capability=(int(properties["computeMajor"]), int(properties["computeMinor"])),
                sms=int(properties["numSms"]),
                threads_per_block=int(properties["maxThreadsPerBlock"]),
                threads_per_sm=int(properties["maxThreadsPerMultiprocessor"]),
                registers_per_block=int(properties["regsPerBlock"]),
                registers_per_sm=int(properties["regsPerMultiprocessor"]),
                shared_per_block=int(properties["sharedMemPerBlock"]),
                shared_per_block_optin=int(properties["sharedMemPerBlockOptin"]),
                shared_per_sm=int(properties["sharedMemPerMultiprocessor"]),
            )
        except (KeyError, TypeError, ValueError):
            return None


def devices(metadata: Mapping[str, Any]) -> dict[int, Device]:
    """The GPUs that the metadata of a trace describes, by their index."""
    found = {}
    entries = metadata.get("deviceProperties")
    for entry in entries if isinstance(entries, list) else ():
        if (device := Device.parse(entry)) and isinstance(entry.get("id", 0), int):
            found[entry.get("id", 0)] = device
    return found


@dataclass(frozen=True)
class Occupancy:
    """How much of a GPU's warps a kernel keeps busy. Percentages are not rounded.

    Attributes:
        blocks_per_sm: blocks that fit on an SM at once.
        limiters: what allows no more of them: some of "registers", "shared memory", "warps",
            "blocks".
        theoretical_percent: warps of these blocks, of those that an SM holds.
        achieved_percent: the same with no more blocks than the grid has for each SM.
        waves: how many times the grid fills the GPU; below 1 some of it is idle.
        kineto_percent: "est. achieved occupancy %" of the trace, or None where it has none.
        kineto_why: why that figure is another, or None where it agrees.
    """

    blocks_per_sm: int
    limiters: tuple[str, ...]
    theoretical_percent: float
    achieved_percent: float
    waves: float
    kineto_percent: float | None = None
    kineto_why: str | None = None

    def __str__(self) -> str:
        limits = " and ".join(self.limiters)
        text = (
            f"{self.achieved_percent:.1f} % achieved, {self.theoretical_percent:.1f} % theoretical "
            f"({self.blocks_per_sm} block{'s' * (self.blocks_per_sm > 1)} on an SM, limited by "
            f"{limits}), {self.waves:.2g} waves"
        )
        if self.waves < 1:
            text += ": the grid is smaller than one wave"
        return f"{text}; {self.kineto_why}" if self.kineto_why else text


def block_limits(
    device: Device, registers: int, shared: int, threads: int, optin: bool = True
) -> dict[str, int] | None:
    """Blocks that fit on an SM by each limit; 0 where one block is too much.

    Args:
        registers: of a thread.
        shared: bytes of a block, static and dynamic together.
        threads: of a block.
        optin: whether the kernel may use more than 48 KiB, as one that has run may.

    Returns:
        None for a compute capability that is not known here.
    """
    max_blocks = _MAX_BLOCKS.get(device.capability)
    if max_blocks is None or threads < 1:
        return None
    reserved, unit = (1024, 128) if device.capability >= (8, 0) else (0, 256)
    warps = ceil(threads / _WARP)

    by_warps = device.threads_per_sm // _WARP // warps
    if threads > device.threads_per_block:
        by_warps = 0

    of_warp = ceil(registers * _WARP / _REGISTER_UNIT) * _REGISTER_UNIT
    checked = of_warp * ceil(warps / _PARTITIONS) * _PARTITIONS  # as a launch checks it
    if registers > _MAX_REGISTERS or checked > device.registers_per_block:
        by_registers = 0
    elif of_warp == 0:
        by_registers = _NO_LIMIT
    else:
        warps_per_partition = device.registers_per_sm // _PARTITIONS // of_warp
        by_registers = warps_per_partition * _PARTITIONS // warps

    allocated = ceil((shared + reserved) / unit) * unit
    most = device.shared_per_block_optin if optin else device.shared_per_block
    if allocated > most + reserved:
        by_shared = 0
    else:
        by_shared = device.shared_per_sm // allocated if allocated else _NO_LIMIT
    return {
        "registers": by_registers,
        "shared memory": by_shared,
        "warps": by_warps,
        "blocks": max_blocks,
    }


def occupancy_of(kernel: Event, devices: Mapping[int, Device]) -> Occupancy | None:
    """Of a kernel of a trace; None where the trace does not say what it takes to know."""
    launch = _launch(kernel)
    device = devices.get(kernel.args.get("device", 0))
    if launch is None or device is None:
        return None
    registers, shared, threads, grid = launch
    limits = block_limits(device, registers, shared, threads)
    if limits is None or not (blocks := min(limits.values())):
        return None

    def percent(blocks: float) -> float:
        return 100.0 * blocks * ceil(threads / _WARP) * _WARP / device.threads_per_sm

    achieved = percent(min(blocks, grid / device.sms))
    kineto = kernel.args.get("est. achieved occupancy %")
    kineto = float(kineto) if isinstance(kineto, (int, float)) else None
    why = None
    if kineto is not None and abs(kineto - achieved) > 0.5 + 1e-9:
        default = block_limits(device, registers, shared, threads, optin=False)
        if kineto == 0 and default and not default["shared memory"]:
            why = (
                f"the trace says 0 % because Kineto allows {device.shared_per_block / 1024:.0f} "
                f"KiB of shared memory and this kernel has {shared / 1024:.1f} KiB"
            )
        else:
            why = f"the trace says {kineto:.0f} %"
    return Occupancy(
        blocks_per_sm=blocks,
        limiters=tuple(name for name, limit in limits.items() if limit == blocks),
        theoretical_percent=percent(blocks),
        achieved_percent=achieved,
        waves=grid / (blocks * device.sms),
        kineto_percent=kineto,
        kineto_why=why,
    )


def _launch(kernel: Event) -> tuple[int, ...] | None:
    """Registers of a thread, shared memory, threads of a block, blocks of the grid."""
    registers = kernel.args.get("registers per thread")
    shared = kernel.args.get("shared memory")
    if not isinstance(registers, int) or not isinstance(shared, int):
        return None
    sizes = []
    for name in ("block", "grid"):
        size = kernel.args.get(name)
        if not isinstance(size, list) or not size or not all(isinstance(n, int) for n in size):
            return None
        sizes.append(prod(size))
    return (registers, shared, *sizes) if min(sizes) > 0 else None
