"""`python -m specgen` and the `specgen` program."""

from specgen.cli.app import main

if __name__ == "__main__":
    main()
