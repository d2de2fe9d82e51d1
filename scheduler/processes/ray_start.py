"""Starts or joins Ray, and reads what its machines have."""

import functools
import importlib.util
import logging
import os
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.exceptions import AuthenticationError

from grmpipe.models.import_path import worker_setup
from grmpipe.scheduler.placement import ClusterConfig, NodeCapacity
from grmpipe.scheduler.processes.fork_server import worker_command
from grmpipe.scheduler.processes.process_signals import block_signals, kill_with_children, rearm_handlers

NO_START = "Ray didn't start on this machine; if it is slow or busy, try again, or type cluster=inprocess"
ANSWER_S = 3.0  # for a machine of the cluster to accept a connection; Ray itself waits for half a minute

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def nodes_of_ray() -> list[NodeCapacity]:
    """The resources of the machines of the running Ray."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    hosts = Counter(node["NodeManagerHostname"] for node in alive)
    return [
        NodeCapacity(
            name="this machine" if len(alive) == 1 else name_node(node, hosts),
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            address=node["NodeManagerAddress"],
        )
        for node in alive
    ]


def name_node(node: Mapping[str, str], hosts: Mapping[str, int]) -> str:
    """The host's name, with the address where several nodes have the same one. `hosts`: name -> number of nodes."""
    host = node["NodeManagerHostname"]
    return host if hosts[host] == 1 else f"{host} ({node['NodeManagerAddress']})"


@contextmanager
def join_cluster(config: ClusterConfig) -> Iterator[list[NodeCapacity]]:
    """Context on a running Ray, with the resources of its machines. Raises ValueError if nothing answers."""
    init_ray(config)
    try:
        yield nodes_of_ray()
    finally:
        with own_signals():
            ray.shutdown()


def init_ray(config: ClusterConfig) -> None:
    """Start Ray quietly: processes write to Ray's log folder. Its sockets require Ray's own token."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    with own_signals():
        if config.address is not None:
            _join_ray(config.address, config.packages, select_env_vars(config.env_vars, os.environ))
            return
        if (command := worker_command()) is not None:  # idle workers that Ray starts ahead would not have it
            os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        try:
            with block_signals():
                ray.init(
                    address="local",
                    runtime_env={"py_executable": command} if command is not None else None,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=config.object_store_mb << 20,
                )
        except Exception as error:
            error.add_note(NO_START)
            raise
        node = ray._private.worker._global_node
        assert node is not None, "it has just been started"
        for servers in node.all_processes.values():
            for server in servers:
                server.process.terminate = functools.partial(_kill_server, server.process)


@contextmanager
def own_signals() -> Iterator[None]:
    """Context that keeps signal handlers. Ray replaces SIGTERM's at its start, in Python by a silent exit, in C++ by an
    abort; and at its end by the system's.
    """
    replace = ray._private.utils.set_sigterm_handler
    ray._private.utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = replace
        rearm_handlers()


def _kill_server(process: subprocess.Popen[bytes]) -> None:
    """In place of Ray's request to end: a signal that its servers block, and a second's wait for each."""
    rearm_handlers()  # not only at the end of Ray's shutdown, which waits for each of them
    kill_with_children(process)


def select_env_vars(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that the processes of a joined cluster get from the driver. Raises ValueError for a
    name without a value.
    """
    found: dict[str, str] = {}
    for name in names:
        if name.endswith("*"):
            found |= {other: value for other, value in environment.items() if other.startswith(name[:-1])}
        elif name in environment:
            found[name] = environment[name]
        else:
            raise ValueError(f"cluster.env_vars: {name} is not set; export it first, or remove it from the list")
    return found


def without_allocator(*environments: Mapping[str, str]) -> dict[str, str]:
    """Empty values for the settings of torch's allocator that these environments have."""
    return {name: "" for name in ALLOCATOR_VARIABLES if any(name in one for one in environments)}


def count_threads(nodes: Sequence[NodeCapacity], gpus: float) -> int:
    """The threads of a process with this many GPUs, or a part of one: its share of the cores per GPU."""
    cores = min((node.cpus / node.gpus for node in nodes if node.gpus > 0), default=1.0)
    return max(1, int(cores * min(gpus, 1.0)))


def _join_ray(address: str, packages: Sequence[str], env_vars: Mapping[str, str]) -> None:
    """Join a running Ray. Raises ValueError if nothing answers at the address, or a package can't be imported here."""
    modules = [_find_source(name) for name in dict.fromkeys(("grmpipe", *packages))]
    _knock(address)
    try:
        ray.init(
            address=address,
            runtime_env={
                "py_modules": modules,
                "env_vars": dict(env_vars),
                "worker_process_setup_hook": worker_setup(),
            },
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, AuthenticationError) as error:
        raise ValueError(
            f"cluster.address: can't connect to a Ray at {address} ({error}); check that it runs, and if it requires a "
            "token set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH; or set "
            "cluster.address=null to start one on this machine"
        ) from error


def _knock(address: str) -> None:
    """Check that something listens at host:port. Other forms of an address are left to Ray. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError, UnicodeError) as error:  # also a port above 65535, a name that is none
        raise ValueError(
            f"cluster.address: nothing listens at {address} ({error}); give the address that `ray start --head` "
            "printed, or set cluster.address=null to start a Ray on this machine"
        ) from error


def _find_source(name: str) -> str:
    """The folder of a package, or the file of a module."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
    if not places or not Path(places[0]).exists():
        raise ValueError(f"cluster.packages: {name!r} can't be imported; give importable packages or modules")
    place: str = places[0]
    return place


def free_now() -> str:
    free = ray.available_resources()
    return f"{free.get('CPU', 0):g} cores, {free.get('GPU', 0):g} GPUs"
