"""`python -m trl_realloc.cli`."""

from .main import main


raise SystemExit(main())
