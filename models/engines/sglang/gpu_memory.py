"""The used memory of this process's GPUs, by all processes: SGLang doesn't report it."""

import asyncio
import os

MIB = 2**20


async def measure_gpu_bytes() -> int:
    """Used bytes of the GPUs visible to this process, by nvidia-smi. 0 if there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible:
        command += ["-i", visible]
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return 0
    output, _ = await process.communicate()
    return sum(int(line) * MIB for line in output.decode().split() if line.isdigit())
