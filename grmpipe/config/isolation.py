"""Settings of how episodes are kept apart from the run and from each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

INPROCESS, PROCESS, CONTAINER = "inprocess", "process", "container"
ISOLATION_KINDS = (INPROCESS, PROCESS, CONTAINER)
RUNTIMES = ("docker", "podman", "apptainer")
COUNTS = ("memory_mb", "cpu_s", "max_processes", "max_files", "file_mb")


@dataclass(frozen=True)
class IsolationConfig:
    """How episodes are kept apart from the run and from each other. The limits hold for each episode, and are never
    infinite.
    """

    # Where an episode runs; inprocess: in the run itself, for code that you trust; process: in a process of its own, on
    # Linux, without root; container: in a container of its own.
    kind: str = INPROCESS
    # Whether a run is refused where a part of the isolation is missing; task=doctor shows what there is.
    require: bool = False
    # [MB] Memory of all processes of an episode together; kind=process: also the address space of each, both beyond
    # what the environment's code takes when it is imported.
    memory_mb: int = 512
    cpu_s: int = 60  # [seconds] CPU time of each process of an episode.
    max_processes: int = 32  # [processes] Processes and threads of an episode.
    max_files: int = 256  # [files] Open files of each process.
    file_mb: int = 64  # [MB] Files in the episode's folder, which is deleted at its end.
    network: bool = False  # Whether an episode has the network.
    # Files and folders that an episode may read, besides Python, its packages and /usr.
    read: list[str] = field(default_factory=list)
    # Names of environment variables that an episode gets; it gets no others.
    pass_env: list[str] = field(default_factory=list)
    image: str = ""  # For kind=container: the image, with Python, msgspec and your code in it.
    runtime: str = "docker"  # For kind=container: docker, podman or apptainer.

    def __post_init__(self) -> None:
        if self.kind not in ISOLATION_KINDS:
            raise ValueError(f"kind: unknown isolation {self.kind!r}; known: {', '.join(ISOLATION_KINDS)}")
        if self.runtime not in RUNTIMES:
            raise ValueError(f"runtime: unknown runtime {self.runtime!r}; known: {', '.join(RUNTIMES)}")
        for key in COUNTS:
            value = getattr(self, key)
            if not 0 < value < math.inf:
                raise ValueError(f"{key}: must be above 0 and finite, got {value}")
        if self.max_files < 16:
            raise ValueError(f"max_files: must be at least 16, which Python itself needs, got {self.max_files}")
        if self.kind == CONTAINER and not self.image:
            raise ValueError("image: is empty; for kind=container name the image that holds Python and your code")
        if self.image and self.kind != CONTAINER:
            raise ValueError("image: is for kind=container; set that, or leave it out")
