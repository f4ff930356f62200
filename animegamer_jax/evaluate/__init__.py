"""`animegamer evaluate`: plays a benchmark, scores it, writes a report."""
