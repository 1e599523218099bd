"""`python -m experiments`: see runner.py."""

from experiments.runner import main

raise SystemExit(main())
