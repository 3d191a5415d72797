"""Cases of the benchmark suite; twofour.measure is the only timer."""
