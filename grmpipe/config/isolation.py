"""Settings of how episodes are kept apart from the run and from each other."""

from dataclasses import dataclass, field

from grmpipe.models.bounds import Bounded, one_of, positive

INPROCESS, PROCESS, CONTAINER = "inprocess", "process", "container"
ISOLATION_KINDS = (INPROCESS, PROCESS, CONTAINER)
RUNTIMES = ("docker", "podman", "apptainer")
COUNT = "above 0 and finite"


@dataclass(frozen=True)
class IsolationConfig(Bounded):
    """How episodes are kept apart from the run and from each other. The limits hold for each episode, and are never
    infinite.
    """

    # Where an episode runs; inprocess: in the run itself, for code that you trust; process: in a process of its own, on
    # Linux, without root; container: in a container of its own.
    kind: str = one_of(ISOLATION_KINDS, INPROCESS, "isolation")
    # Whether a run is refused where a part of the isolation is missing; task=doctor shows what there is.
    require: bool = False
    # [MB] Memory of all processes of an episode together; kind=process: also the address space of each, both beyond
    # what the environment's code takes when it is imported.
    memory_mb: int = positive(512, COUNT)
    cpu_s: int = positive(60, COUNT)  # [seconds] CPU time of each process of an episode.
    max_processes: int = positive(32, COUNT)  # [processes] Processes and threads of an episode.
    file_mb: int = positive(64, COUNT)  # [MB] Files in the episode's folder, which is deleted at its end.
    network: bool = False  # Whether an episode has the network.
    # Files and folders that an episode may read, besides the system's programs, Python, what is installed for it, and
    # modules that the environment imports; of a folder not the run and its data.
    read: list[str] = field(default_factory=list)
    # Names of environment variables that an episode gets; it gets no others.
    pass_env: list[str] = field(default_factory=list)
    image: str = ""  # For kind=container: the image, with Python, msgspec and your code in it.
    # For kind=container: docker, podman or apptainer.
    runtime: str = one_of(RUNTIMES, "docker", "runtime")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == CONTAINER and not self.image:
            raise ValueError("image: is empty; for kind=container name the image that holds Python and your code")
        if self.image and self.kind != CONTAINER:
            raise ValueError("image: is for kind=container; set that, or leave it out")
