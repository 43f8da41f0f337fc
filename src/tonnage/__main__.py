"""``python -m tonnage`` is the ``tonnage`` command."""

from tonnage.cli.main import main

if __name__ == "__main__":
    main()
