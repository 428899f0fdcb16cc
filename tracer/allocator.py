"""How many bytes torch's allocators count for a request.

On the CPU they count what was asked for. The CUDA caching allocator hands out blocks: multiples of
512 bytes, cut from segments that it takes from the device. A request of 10 MiB or more gets a
segment of its own, a multiple of 2 MiB, and what is left of it is cut off only if it is more than
1 MiB; else the block is larger than asked for, and counts as such. (Requests between 1 and 10 MiB
share segments of 20 MiB: only the last one in each is larger, which is not predicted.) With
expandable segments every block is cut to size. Source: `c10/cuda/CUDACachingAllocator.cpp`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

CUDA_BLOCK = 512
_OWN_SEGMENT = 10 << 20
_SEGMENT = 2 << 20
_LEFT_IN_PLACE = 1 << 20
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def cuda_bytes(nbytes: int, *, expandable: bool = False) -> int:
    """Bytes of the block that the CUDA caching allocator hands out for a request."""
    block = rounded(nbytes, CUDA_BLOCK)
    if block < _OWN_SEGMENT or expandable:
        return block
    segment = rounded(block, _SEGMENT)
    return segment if segment - block <= _LEFT_IN_PLACE else block


def allocated_bytes(nbytes: int, device_type: str) -> int:
    """Bytes that the allocator of this process counts for a request on a kind of device."""
    return cuda_bytes(nbytes, expandable=expandable_segments()) if device_type == "cuda" else nbytes


def expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the settings that CUDA programs are started with ask for expandable segments."""
    text = ",".join(environment.get(name, "") for name in _SETTINGS)
    pairs = (pair.partition(":") for pair in text.replace(" ", "").split(","))
    return {key: value for key, _, value in pairs}.get("expandable_segments") == "True"


def rounded(nbytes: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-nbytes // unit) * unit
