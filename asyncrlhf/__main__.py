"""``python -m asyncrlhf``: the same as the console script."""

from asyncrlhf.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
