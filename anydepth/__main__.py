"""python -m anydepth: the command line."""

from anydepth.cli import main

main()
