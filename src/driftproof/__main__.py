"""``python -m driftproof``"""

from driftproof.cli import main

main()
