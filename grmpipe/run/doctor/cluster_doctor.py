"""task=doctor on every machine of a joined cluster: one line per machine and check.

A process on each machine examines it; machines with GPUs have a second one, on a GPU.
"""

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from grmpipe.config.io.key_errors import section
from grmpipe.config.keys.entry_names import POLICY
from grmpipe.config.run_config import RunConfig
from grmpipe.models.lm.footprint import BYTES_OF_ADAM, footprint_of_shape
from grmpipe.models.settings import LoraConfig, ModelShape
from grmpipe.run.doctor.node_examiner import Expected, Finding, NodeExaminer, versions
from grmpipe.scheduler.placement import (
    ClusterConfig,
    NodeCapacity,
    Placement,
    PlacementConfig,
    PoolConfig,
    RoleConfig,
    place,
)
from grmpipe.scheduler.processes.actors import ActorRanks

NODES, GPUS = "nodes", "gpus"  # roles: a process on each machine; on a GPU of each machine that has one
REDUCE_MB = {NODES: 4, GPUS: 256}
REDUCE_TIMEOUT_S = 120.0
# Between machines with GPUs. Below it NCCL has most likely fallen back to sockets: 10 Gb/s are 1.25 GB/s, one adapter
# of 200 Gb/s 25.
LEAST_NCCL_GB_PER_S = 5.0


def examine_cluster(config: RunConfig) -> list[Finding]:
    """Join the cluster of the configuration, examine its machines, and leave it. Raises ConfigError if it can't be
    joined, or has no free slot on each machine.
    """
    from grmpipe.scheduler.processes.ray_start import join_cluster  # late: doctor works without Ray

    with section(""), join_cluster(config.cluster) as nodes:
        return asyncio.run(_examine(config.cluster, list_expectations(config), nodes))


def report(address: str, findings: Sequence[Finding]) -> str:
    """One line per machine and check."""
    names = list(dict.fromkeys(finding.node for finding in findings))
    wide, checks = max(map(len, names)), max(len(finding.check) for finding in findings)
    lines = [f"cluster {address}: machines {len(names)}, problems {sum(not finding.ok for finding in findings)}"]
    for finding in findings:
        mark = "ok     " if finding.ok else "PROBLEM"
        lines.append(f"  {finding.node:<{wide}}  {finding.check:<{checks}}  {mark}  {finding.text}")
    return "\n".join(lines)


def list_expectations(config: RunConfig) -> Expected:
    """What the run needs of every machine."""
    return Expected(
        versions=versions(),
        folder=str(Path(config.run_dir or "runs").absolute()),
        checkpoints_gb=checkpoint_gb(config),
        models={role: config.models[role].path for role in (POLICY, *config.judging.local_roles)},
        isolation=config.env.isolation if config.places_envs else None,
    )


async def _examine(settings: ClusterConfig, expected: Expected, nodes: Sequence[NodeCapacity]) -> list[Finding]:
    from grmpipe.scheduler.processes.ray_cluster import RayCluster

    cluster = await RayCluster.start(settings, placement_on(nodes))
    try:
        members = await cluster.start_members(NODES, NodeExaminer)
        on_gpus = await cluster.start_members(GPUS, NodeExaminer) if any(node.gpus for node in nodes) else None
        return await examine_nodes(expected, nodes, members, on_gpus)
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


async def examine_nodes(
    expected: Expected, nodes: Sequence[NodeCapacity], members: ActorRanks, on_gpus: ActorRanks | None
) -> list[Finding]:
    """All findings, ordered by machine."""
    addresses = cast(list[str], await members.call_all("address"))
    by_address = {node.address: node for node in nodes}
    each = [(expected, by_address[address].gpus > 0) for address in addresses]
    alone = cast(list[list[Finding]], await members.call_each("examine", each))
    names = [by_address[address].name for address in addresses]
    findings = [replace(one, node=name) for name, found in zip(names, alone, strict=True) for one in found]
    findings += await ports(names, addresses, members)
    findings += await check_shared_folder(names, expected.folder, members)
    findings += (
        await check_all_reduce(names, members, NODES) if on_gpus is None else await gpus(names, addresses, on_gpus)
    )
    findings += [
        Finding(node=node.name, check="cores", ok=False, text="none in Ray: not examined; start it with --num-cpus=2")
        for node in nodes
        if not node.cpus
    ]
    order = {name: place for place, name in enumerate(names)}
    return sorted(findings, key=lambda finding: order.get(finding.node, len(order)))


def checkpoint_gb(config: RunConfig) -> float:
    """Space of the checkpoints that a run keeps and of the one that it writes: float32 weights and two moments of all
    that learns. A model whose size isn't declared counts 0.
    """
    models = [config.models[role] for role, learner in config.learners.items() if learner in config.roles]
    learning = [(model.shape, model.lora) for model in models]
    if "critic" in config.roles and config.critic.path is None:
        learning.append((config.policy.shape, LoraConfig()))
    num_values = sum(count_trained_values(shape, lora) for shape, lora in learning)
    return (config.train.keep_checkpoints + 1) * num_values * (4 + BYTES_OF_ADAM) / 1e9


def count_trained_values(shape: ModelShape, lora: LoraConfig) -> int:
    """The trained values of a model, or of its adapters; 0 if its size isn't declared."""
    return footprint_of_shape(shape).count_trained(lora) if shape.declared else 0


# -- what lies between machines --------------------------------------------------------------------------------------


async def ports(names: Sequence[str], addresses: Sequence[str], members: ActorRanks) -> list[Finding]:
    """Whether each machine can connect to a port of every other one."""
    opened = cast(list[int], await members.call_each("listen", [(address,) for address in addresses]))
    everyone = tuple(zip(addresses, opened, strict=True))
    others = [(everyone[:rank] + everyone[rank + 1 :],) for rank in range(len(names))]
    failed = cast(list[list[str]], await members.call_each("unreachable", others))
    reached = f"reaches {len(names) - 1} other {'machine' if len(names) == 2 else 'machines'}"
    return [
        Finding(
            node=node,
            check="ports",
            ok=not lost,
            text=f"can't connect to {', '.join(lost)}: allow all TCP ports between the machines" if lost else reached,
        )
        for node, lost in zip(names, failed, strict=True)
    ]


async def check_shared_folder(names: Sequence[str], folder: str, members: ActorRanks) -> list[Finding]:
    """Whether what one machine, or the driver, writes into the run's folder is read by all others."""
    driver, token = NodeExaminer(-1, 0, None), uuid.uuid4().hex
    files = [f".doctor-{token}-{rank}" for rank in range(len(names))]
    own = f".doctor-{token}-driver"
    writers = {**dict(zip(files, names, strict=True)), own: "the driver"}
    try:
        driver.write(folder, own)
        refused = cast(list[str], await members.call_each("write", [(folder, file) for file in files]))
        unread = cast(list[list[str]], await members.call_all("unread", folder, tuple(writers)))
    finally:
        await members.call_each("erase", [(folder, file) for file in files])
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


async def gpus(names: Sequence[str], addresses: Sequence[str], on_gpus: ActorRanks) -> list[Finding]:
    """The GPUs of the machines that have any, and NCCL between them."""
    by_address = dict(zip(addresses, names, strict=True))
    there = cast(list[str], await on_gpus.call_all("address"))
    own = [by_address.get(address, address) for address in there]
    seen = cast(list[list[str]], await on_gpus.call_all("gpus"))
    none = "torch sees no GPU, though Ray has some: check nvidia-smi, and torch.cuda.is_available() in Ray's venv"
    findings = [
        Finding(node=node, check="GPU", ok=bool(devices), text=", ".join(devices) or none)
        for node, devices in zip(own, seen, strict=True)
    ]
    return findings + await check_all_reduce(own, on_gpus, GPUS) if all(seen) else findings


async def check_all_reduce(names: Sequence[str], members: ActorRanks, role: str) -> list[Finding]:
    """A sum over all machines, as a learner's ranks do it."""
    check, size = ("NCCL" if role == GPUS else "gloo"), REDUCE_MB[role]
    try:
        async with asyncio.timeout(REDUCE_TIMEOUT_S):
            seconds = cast(list[float], await members.call_all("all_reduce", size))
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
