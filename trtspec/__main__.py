"""`python -m trtspec`."""

from __future__ import annotations

from trtspec.cli import main

if __name__ == "__main__":
    main(prog_name="trtspec")
