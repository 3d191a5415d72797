"""`python -m twofour` is the command `twofour`."""

from twofour.cli import main

if __name__ == "__main__":
    main()
