"""The wires, by the name of their trainer. A further one is a file and a row."""

from collections.abc import Mapping

from grmpipe.serve.wires import nemo_gym, openrlhf, remote_rm, xtuner
from grmpipe.serve.wires.wire import Wire

WIRES: Mapping[str, Wire] = {
    "openrlhf": openrlhf.WIRE,
    "slime": remote_rm.SLIME,
    "miles": remote_rm.MILES,
    "relax": remote_rm.RELAX,
    "nemo_gym": nemo_gym.WIRE,
    "xtuner": xtuner.WIRE,
}
