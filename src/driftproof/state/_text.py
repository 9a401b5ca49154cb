from driftproof._text import printable as printable
