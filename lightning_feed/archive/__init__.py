"""At rest: where the encoded samples lie, and how they are read."""
