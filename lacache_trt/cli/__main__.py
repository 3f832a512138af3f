"""`python -m lacache_trt.cli`."""

from lacache_trt.cli.main import main

main()
