"""`python -m lacache_trt.cli`."""

from lacache_trt.cli.entry import main

main()
