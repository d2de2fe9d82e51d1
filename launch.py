"""`python launch.py ...` in a checkout is the command `grmpipe ...` of an installation: see grmpipe/command.py."""

from __future__ import annotations

from grmpipe.command import main

if __name__ == "__main__":
    main()
