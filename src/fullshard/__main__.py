"""``python -m fullshard``: the command line, where the script itself is not on the path."""

from .cli.main import main

if __name__ == "__main__":
    main()
