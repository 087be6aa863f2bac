"""`python -m eaglet`: the command line, as torchrun starts it."""

from eaglet.cli import main

main()
