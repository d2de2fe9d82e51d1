"""The command `grmpipe`: help and version at once, everything else by grmpipe/cli.py."""

import sys

from grmpipe.help import HELP, VERSION, write_help, write_version


def main() -> None:
    typed = sys.argv[1:]
    if typed in ([], ["help"]) or not set(HELP).isdisjoint(typed):
        print(write_help(), end="")
    elif VERSION in typed:
        print(write_version())
    else:
        from grmpipe.cli import command  # late: it imports Hydra

        command()
