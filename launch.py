"""`python launch.py ...` in a checkout is the command `grmpipe ...` of an installation: see grmpipe/cli.py."""

from __future__ import annotations

from grmpipe.cli import command

if __name__ == "__main__":
    command()
