"""Waits until a running Ray has as many nodes as a script has started.

python -m grmpipe.scheduler.processes.await_nodes ADDRESS NODES [SECONDS]

Its machine must be one of the nodes: Ray's clients talk to a raylet beside them.
"""

import logging
import sys
import time
from collections.abc import Callable

import ray


def num_alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def await_nodes(wanted: int, seconds: float, count: Callable[[], int] = num_alive, pause_s: float = 1.0) -> int:
    """The number of nodes once there are enough. Raises TimeoutError that says how many came."""
    ends = time.monotonic() + seconds
    while (found := count()) < wanted:
        if time.monotonic() > ends:
            raise TimeoutError(
                f"{found} of {wanted} nodes joined within {seconds:.0f} s; see the output of `ray start`"
            )
        time.sleep(pause_s)
    return found


def main(arguments: list[str]) -> int:
    address, wanted, *rest = arguments
    seconds = float(rest[0]) if rest else 300.0
    ends = time.monotonic() + seconds
    while True:  # the head may not listen yet
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            break
        except Exception as error:  # Ray raises a bare one while its head has no node yet
            ray.shutdown()
            if time.monotonic() > ends:
                print(f"no Ray at {address} within {seconds:.0f} s: {error}", file=sys.stderr)
                return 1
            time.sleep(1.0)
    try:
        print(f"{await_nodes(int(wanted), ends - time.monotonic())} nodes joined {address}")
    except TimeoutError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
