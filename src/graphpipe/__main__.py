"""``python -m graphpipe`` is the command ``graphpipe``."""

from graphpipe.cli import main

if __name__ == "__main__":
    main()
