"""Everything a user may choose, and the arithmetic that follows from it. A leaf package: imports no torch."""
