"""python -m proxy: the same as the command llama-lease."""

from proxy.cli import main

main()
