"""The devices that simulated processes share: a GPU by those on it, the cores of a machine by all that run there.

Busy processes get equal shares, and none gets more than one core or one GPU. If more processes are busy than there are
cores, they alternate, and each switch begins with cold caches.
"""

from grmpipe.capacity.lower_bound import DRIVER, is_on_cpu
from grmpipe.models.engines.simulated.simulated_rate import SharedDevice
from grmpipe.scheduler.placement import Placement

# Share of the work that one further process per core adds: measured with three to five engines on two cores.
CONTEXT_SWITCH_COST = 0.16


def find_shared_devices(placement: Placement, cores: int) -> dict[str, SharedDevice]:
    """Name of a seat, or of the driver -> the device it shares with others. Processes with seats on CPUs run on any
    free one of `cores` cores; 0: each CPU slot is its own core. A process on several GPUs counts on the first that it
    shares.
    """
    machine, devices = SharedDevice(cores, CONTEXT_SWITCH_COST), {}
    by_slot: dict[tuple[str, int], list[str]] = {}
    for seat in (seat for seats in placement.seats.values() for seat in seats):
        if cores and is_on_cpu(placement, seat):
            devices[seat.name] = machine
            continue
        for slot in seat.slots:
            by_slot.setdefault((seat.pool, slot), []).append(seat.name)
    for names in by_slot.values():
        if len(names) > 1:
            device = SharedDevice()
            devices |= {name: device for name in names if name not in devices}
    return devices | ({DRIVER: machine} if cores else {})
