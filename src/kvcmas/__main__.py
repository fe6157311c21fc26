"""`python -m kvcmas` is the command `kvcmas`."""

from __future__ import annotations

from kvcmas.cli.main import main

if __name__ == "__main__":
    main()
