"""``python -m llm_datadist`` is the console script ``llm-datadist``."""

import sys

from llm_datadist.cli import main

if __name__ == "__main__":
    sys.exit(main())
