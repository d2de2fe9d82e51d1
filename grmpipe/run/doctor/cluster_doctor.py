"""task=doctor on every machine of a joined cluster: one line per machine and check.

A process on each machine reports what it has; machines with GPUs have a second one, on a GPU. The driver compares.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from grmpipe.config.entry_names import POLICY
from grmpipe.config.isolation import IsolationConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.run.doctor.node_examiner import NodeExaminer, NodeFacts, versions
from grmpipe.validate.sections import section
from models.lm.footprint import BYTES_OF_A_MOMENT, footprint_of_shape
from models.settings import LoraConfig, ModelShape
from scheduler.placement import NodeCapacity, Placement, PlacementConfig, PoolConfig, RoleConfig, place
from scheduler.processes.actors import ActorGroup

NODES, GPUS = "nodes", "gpus"  # roles: a process on each machine; on a GPU of each machine that has one
MOST_SKEW_S = 1.0
CLOCK_READINGS = 5
REDUCE_MB = {NODES: 4, GPUS: 256}
REDUCE_TIMEOUT_S = 120.0
# Between machines with GPUs. Below it NCCL has most likely fallen back to sockets: 10 Gb/s are 1.25 GB/s, one adapter
# of 200 Gb/s 25.
LEAST_NCCL_GB_PER_S = 5.0
LEAST_SHM_GB = {False: 0.2, True: 8.0}  # by whether a machine has GPUs: vLLM and NCCL on it use more
LEAST_DISK_GB = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check on one machine. `text`: what was found, or what to do."""

    node: str
    check: str
    ok: bool
    text: str


def examine_cluster(config: RunConfig) -> list[Finding]:
    """Join the cluster of the configuration, examine its machines, and leave it. Raises ConfigError if it can't be
    joined, or has no free slot on each machine.
    """
    from scheduler.processes.ray_start import joined  # late: doctor works without Ray

    folder = str(Path(config.run_dir or "runs").absolute())
    with section(""), joined(config.cluster) as nodes:
        return asyncio.run(_examine(config, folder, nodes))


def report(address: str, findings: Sequence[Finding]) -> str:
    """One line per machine and check."""
    names = list(dict.fromkeys(finding.node for finding in findings))
    wide, checks = max(map(len, names)), max(len(finding.check) for finding in findings)
    lines = [f"cluster {address}: machines {len(names)}, problems {sum(not finding.ok for finding in findings)}"]
    for finding in findings:
        mark = "ok     " if finding.ok else "PROBLEM"
        lines.append(f"  {finding.node:<{wide}}  {finding.check:<{checks}}  {mark}  {finding.text}")
    return "\n".join(lines)


async def _examine(config: RunConfig, folder: str, nodes: Sequence[NodeCapacity]) -> list[Finding]:
    from scheduler.processes.ray_cluster import RayCluster

    cluster = await RayCluster.start(config.cluster, placement_on(nodes))
    try:
        group = await cluster.start_group(NODES, NodeExaminer)
        on_gpus = await cluster.start_group(GPUS, NodeExaminer) if any(node.gpus for node in nodes) else None
        return await examined(config, folder, nodes, group, on_gpus)
    finally:
        await cluster.shutdown()


def placement_on(nodes: Sequence[NodeCapacity]) -> Placement:
    """A core on every machine that has any, a GPU on every machine that has any."""
    counts = {NODES: sum(node.cpus > 0 for node in nodes), GPUS: sum(node.gpus > 0 for node in nodes)}
    wanted = {role: count for role, count in counts.items() if count}
    resource = {NODES: "cpu", GPUS: "gpu"}
    pools = {
        role: PoolConfig(slots=count, resource=resource[role], strategy="STRICT_SPREAD")
        for role, count in wanted.items()
    }
    roles = {role: RoleConfig(pool=role, replicas=count) for role, count in wanted.items()}
    return place(PlacementConfig(pools=pools, roles=roles), tuple(wanted))


async def examined(
    config: RunConfig, folder: str, nodes: Sequence[NodeCapacity], group: ActorGroup, on_gpus: ActorGroup | None
) -> list[Finding]:
    """All findings, ordered by machine."""
    addresses = cast(list[str], await group.call_all("address"))
    models = {role: config.models[role].path for role in (POLICY, *config.judging.local_roles)}
    each = [(address, folder, models) for address in addresses]
    facts = cast(list[NodeFacts], await group.call_each("facts", each))
    by_address = {node.address: node for node in nodes}
    names = [by_address[address].name for address in addresses]
    own = versions()
    findings: list[Finding] = []
    for name, one in zip(names, facts, strict=True):
        gpu_node = by_address[one.address].gpus > 0
        findings += [versions_found(name, one.versions, own), cuda_found(name, one, gpu_node)]
        findings += space_found(name, one, gpu_node, checkpoint_gb(config), folder)
        findings += models_found(name, one)
    if config.places_envs:
        findings += await isolation(names, group, config.env.isolation)
    findings += await clocks(names, group)
    findings += await ports(names, addresses, group)
    findings += await shared_folder(names, folder, group)
    findings += await reduced(names, group, NODES) if on_gpus is None else await gpus(names, addresses, on_gpus)
    findings += [
        Finding(node=node.name, check="cores", ok=False, text="none in Ray: not examined; start it with --num-cpus=2")
        for node in nodes
        if not node.cpus
    ]
    order = {name: place for place, name in enumerate(names)}
    return sorted(findings, key=lambda finding: order.get(finding.node, len(order)))


# -- what each machine has -------------------------------------------------------------------------------------------


def versions_found(node: str, found: dict[str, str], own: dict[str, str]) -> Finding:
    """Whether packages and the project are those of the driver."""
    other = [f"{name} {found.get(name)} (driver: {own[name]})" for name in own if found.get(name) != own[name]]
    text = f"grmpipe {own['grmpipe']}, torch {own['torch']}"
    if other:
        text = f"{', '.join(other)}: install the same on all machines, or send packages by cluster.packages"
    return Finding(node=node, check="versions", ok=not other, text=text)


def cuda_found(node: str, facts: NodeFacts, has_gpus: bool) -> Finding:
    """Whether the driver can run torch's CUDA."""
    problems = list(facts.cuda)
    if has_gpus and not facts.driver:
        problems.append("Ray has GPUs here, but there is no NVIDIA driver; in a container use --gpus all")
    text = "; ".join(problems) or (f"driver {facts.driver}" if facts.driver else "no GPU, no driver")
    return Finding(node=node, check="CUDA", ok=not problems, text=text)


def space_found(node: str, facts: NodeFacts, has_gpus: bool, checkpoints_gb: float, folder: str) -> list[Finding]:
    """Whether shared memory and disks have room."""
    shm_ok, tmp_ok = facts.shm_free_gb >= LEAST_SHM_GB[has_gpus], facts.temporary_free_gb >= LEAST_DISK_GB
    wanted = max(LEAST_DISK_GB, checkpoints_gb)
    folder_ok = facts.folder_free_gb >= wanted
    shm, temporary, free = facts.shm_free_gb, facts.temporary_free_gb, facts.folder_free_gb
    grow = f"; it needs {LEAST_SHM_GB[has_gpus]:g}: mount a larger one (docker run --shm-size=64g)"
    ray_needs = f"; Ray's logs and spilled objects need {LEAST_DISK_GB:g}: free some, or start Ray with --temp-dir"
    more = f"; {wanted:.0f} are needed for checkpoints: free some, or lower train.keep_checkpoints"
    return [
        Finding(node=node, check="/dev/shm", ok=shm_ok, text=f"{shm:.1f} GB free{'' if shm_ok else grow}"),
        Finding(node=node, check="/tmp", ok=tmp_ok, text=f"{temporary:.0f} GB free{'' if tmp_ok else ray_needs}"),
        Finding(node=node, check="run's disk", ok=folder_ok, text=f"{free:.0f} GB free{'' if folder_ok else more}"),
    ]


def checkpoint_gb(config: RunConfig) -> float:
    """Space of the checkpoints that a run keeps and of the one that it writes: float32 weights and two moments of all
    that learns. A model whose size isn't declared counts 0.
    """
    models = [config.models[role] for role, learner in config.learners.items() if learner in config.roles]
    learning = [(model.shape, model.lora) for model in models]
    if "critic" in config.roles and config.critic.path is None:
        learning.append((config.policy.shape, LoraConfig()))
    num_values = sum(trained_values(shape, lora) for shape, lora in learning)
    num_bytes = num_values * (4 + 2 * BYTES_OF_A_MOMENT[config.train.optimizer.state_dtype])
    return (config.train.keep_checkpoints + 1) * num_bytes / 1e9


def trained_values(shape: ModelShape, lora: LoraConfig) -> int:
    """The trained values of a model, or of its adapters; 0 if its size isn't declared."""
    if not shape.declared:
        return 0
    footprint = footprint_of_shape(shape)
    return footprint.adapter_parameters(lora.rank, lora.target_modules) if lora.learns else footprint.num_parameters


def models_found(node: str, facts: NodeFacts) -> list[Finding]:
    """Whether the models' files are there."""
    return [
        Finding(node=node, check=f"{role}'s files", ok=not lacking, text=lacking or "complete")
        for role, lacking in facts.models.items()
    ]


async def isolation(names: Sequence[str], group: ActorGroup, config: IsolationConfig) -> list[Finding]:
    """The isolation that environments would have on each machine, as one of the role's hosts may be there."""
    found = cast(list[tuple[str, str]], await group.call_all("isolation", config))
    return [
        Finding(node=node, check="isolation", ok=not lacking, text=f"env.{lacking}" if lacking else had)
        for node, (had, lacking) in zip(names, found, strict=True)
    ]


# -- what lies between machines --------------------------------------------------------------------------------------


async def clocks(names: Sequence[str], group: ActorGroup) -> list[Finding]:
    """Clocks against the driver's, by the quickest of a few answers."""
    found = []
    for rank, node in enumerate(names):
        readings = []
        for _ in range(CLOCK_READINGS):
            began = time.time()
            there = cast(float, await group.call(rank, "now"))
            ended = time.time()
            readings.append(((ended - began) / 2, there - (began + ended) / 2))
        found.append(clock_found(node, *min(readings)))
    return found


def clock_found(node: str, error_s: float, ahead_s: float) -> Finding:
    """`ahead_s`: of the driver's clock, up to `error_s`."""
    ok = abs(ahead_s) - error_s <= MOST_SKEW_S
    text = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the driver's"
    return Finding(node=node, check="clock", ok=ok, text=text if ok else f"{text}: run an NTP service (chrony) on both")


async def ports(names: Sequence[str], addresses: Sequence[str], group: ActorGroup) -> list[Finding]:
    """Whether each machine can connect to a port of every other one."""
    opened = cast(list[int], await group.call_each("listen", [(address,) for address in addresses]))
    everyone = tuple(zip(addresses, opened, strict=True))
    others = [(everyone[:rank] + everyone[rank + 1 :],) for rank in range(len(names))]
    failed = cast(list[list[str]], await group.call_each("unreachable", others))
    return [ports_found(node, lost, len(names) - 1) for node, lost in zip(names, failed, strict=True)]


def ports_found(node: str, lost: Sequence[str], num_others: int) -> Finding:
    text = f"reaches {num_others} other {'machine' if num_others == 1 else 'machines'}"
    if lost:
        text = f"can't connect to {', '.join(lost)}: allow all TCP ports between the machines"
    return Finding(node=node, check="ports", ok=not lost, text=text)


async def shared_folder(names: Sequence[str], folder: str, group: ActorGroup) -> list[Finding]:
    """Whether what one machine, or the driver, writes into the run's folder is read by all others."""
    driver, token = NodeExaminer(-1, 0, None), uuid.uuid4().hex
    files = [f".doctor-{token}-{rank}" for rank in range(len(names))]
    own = f".doctor-{token}-driver"
    writers = {**dict(zip(files, names, strict=True)), own: "the driver"}
    try:
        driver.write(folder, own)
        refused = cast(list[str], await group.call_each("write", [(folder, file) for file in files]))
        unread = cast(list[list[str]], await group.call_all("unread", folder, tuple(writers)))
    finally:
        await group.call_each("erase", [(folder, file) for file in files])
        driver.erase(folder, own)
    return [
        folder_found(node, folder, why, [writers[file] for file in lost])
        for node, why, lost in zip(names, refused, unread, strict=True)
    ]


def folder_found(node: str, folder: str, refused: str, unseen: Iterable[str]) -> Finding:
    """`unseen`: machines whose files can't be read from this one."""
    others, text = [other for other in unseen if other != node], f"{folder}, written and read"
    if refused:
        text = f"{folder} can't be written here ({refused}): mount the shared folder, or type another run_dir"
    elif others:
        text = f"doesn't see what {', '.join(others)} wrote to {folder}: type run_dir=<a folder that all of them share>"
    return Finding(node=node, check="run_dir", ok=not refused and not others, text=text)


async def gpus(names: Sequence[str], addresses: Sequence[str], on_gpus: ActorGroup) -> list[Finding]:
    """The GPUs of the machines that have any, and NCCL between them."""
    by_address = dict(zip(addresses, names, strict=True))
    there = cast(list[str], await on_gpus.call_all("address"))
    own = [by_address.get(address, address) for address in there]
    seen = cast(list[list[str]], await on_gpus.call_all("gpus"))
    findings = [gpus_found(node, devices) for node, devices in zip(own, seen, strict=True)]
    if not all(seen):
        return findings
    return findings + await reduced(own, on_gpus, GPUS)


def gpus_found(node: str, devices: Sequence[str]) -> Finding:
    text = ", ".join(devices)
    if not devices:
        text = "torch sees no GPU, though Ray has some: check nvidia-smi, and torch.cuda.is_available() in Ray's venv"
    return Finding(node=node, check="GPU", ok=bool(devices), text=text)


async def reduced(names: Sequence[str], group: ActorGroup, role: str) -> list[Finding]:
    """A sum over all machines, as a learner's ranks do it."""
    check, size = ("NCCL" if role == GPUS else "gloo"), REDUCE_MB[role]
    try:
        async with asyncio.timeout(REDUCE_TIMEOUT_S):
            seconds = cast(list[float], await group.call_all("all_reduce", size))
    except Exception as error:  # of torch, NCCL or Ray: any of them means that ranks can't work together
        hint = "see the ports above; name the network's interface by NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, set"
        why = f"no end after {REDUCE_TIMEOUT_S:.0f} s" if isinstance(error, TimeoutError) else str(error).split("\n")[0]
        text = f"a sum over all machines failed ({why}): {hint} before `ray start` or sent by cluster.env_vars"
        return [Finding(node=node, check=check, ok=False, text=text) for node in names]
    return [sum_found(node, check, size, len(names), took) for node, took in zip(names, seconds, strict=True)]


def sum_found(node: str, check: str, size_mb: int, num_machines: int, took_s: float) -> Finding:
    """The bandwidth of a sum over all machines. NCCL's must be that of a network for GPUs."""
    rate = 2 * (num_machines - 1) / num_machines * size_mb / took_s / 1e3
    text = f"{size_mb} MB over {num_machines} machines in {took_s * 1e3:.1f} ms: {rate:.2f} GB/s"
    slow = check == "NCCL" and num_machines > 1 and rate < LEAST_NCCL_GB_PER_S
    if slow:
        text += (
            f", below {LEAST_NCCL_GB_PER_S:g}: NCCL may use sockets; set NCCL_DEBUG=INFO and look for NET/IB, and name "
            "the adapters by NCCL_IB_HCA; a container needs the RDMA devices and IPC_LOCK"
        )
    return Finding(node=node, check=check, ok=not slow, text=text)
